"""How each part of an application is made from settings, one module per part; `bullpen.app` puts them together."""
