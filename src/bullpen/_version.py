"""The version and the name of the distribution, in a module of its own so that everything may know them."""

__version__ = "0.1.0"

DISTRIBUTION = "bullpen-mq"
"""What `pip` installs us by. The import and the command are `bullpen`; on the registry that is another project."""


def install_line(*extras: str) -> str:
    """The command that adds extras to an installed bullpen.

    It needs no release: pip takes the installed distribution for the one it is asked for and adds only what the extras
    name, also where the installation came from a checkout.
    """
    return f'pip install "{DISTRIBUTION}[{",".join(extras)}]"'
