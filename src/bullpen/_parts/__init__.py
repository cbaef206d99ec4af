"""Parts of an application, each made from settings. `bullpen.app` puts them together, one module here per part."""
