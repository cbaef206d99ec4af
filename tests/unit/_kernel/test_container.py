"""Objects are found by type or name, made once, and never guessed at."""

from __future__ import annotations

import pytest

from bullpen._kernel.container import Container
from bullpen.errors import NotConfigured


class Mail:
    pass


class Shop:
    def __init__(self, mail: Mail, name: str = "corner") -> None:
        self.mail, self.name = mail, name


class Chicken:
    def __init__(self, egg: Egg) -> None: ...


class Egg:
    def __init__(self, chicken: Chicken) -> None: ...


class Vague:
    def __init__(self, thing) -> None:  # type: ignore[no-untyped-def]  # the mistake under test
        ...


@pytest.mark.requirement("W-53")
def test_an_object_is_found_by_type_and_by_name() -> None:
    container, mail = Container(), Mail()
    container.provide(Mail, mail)
    container.name("post office", Mail())

    assert container.get("post office") is not mail
    with pytest.raises(NotConfigured, match="Mail is not clear"):
        container.get(Mail)
    with pytest.raises(NotConfigured, match="two providers are named 'post office'"):
        container.name("post office", mail)


def test_what_is_asked_for_is_made_once_with_what_it_needs() -> None:
    container = Container()
    container.provide(Mail, Mail)
    container.provide(Shop, Shop)

    shop = container.get(Shop)

    assert container.get(Shop) is shop
    assert shop.mail is container.get(Mail)
    assert container.make(Shop) is not shop


def test_a_function_may_make_it() -> None:
    container = Container()
    container.provide(Mail, Mail())

    def open_shop(mail: Mail) -> Shop:
        return Shop(mail, "big")

    container.provide(Shop, open_shop)

    assert container.get(Shop).name == "big"


@pytest.mark.requirement("W-50")
def test_what_others_provide_is_visible_and_ones_own_comes_first() -> None:
    other, mail = Container(), Mail()
    other.provide(Mail, mail)
    container = Container([other])

    assert container.get(Mail) is mail
    own = Mail()
    container.provide(Mail, own)
    assert container.get(Mail) is own


def test_what_cannot_be_found_or_made_says_why() -> None:
    container = Container()
    container.provide(Mail, Mail())
    container.provide(Chicken, Chicken)
    container.provide(Egg, Egg)

    with pytest.raises(NotConfigured, match=r"nothing provides Shop; there is Chicken, Egg, Mail"):
        container.get(Shop)
    with pytest.raises(NotConfigured, match="nothing provides 'nobody'"):
        container.get("nobody")
    with pytest.raises(NotConfigured, match="these depend on each other in a circle: Chicken -> Egg -> Chi"):
        container.get(Chicken)
    with pytest.raises(NotConfigured, match="Vague needs 'thing', but its annotation is not"):
        container.make(Vague)
    with pytest.raises(NotConfigured, match="is not a Mail and does not make one"):
        container.provide(Mail, 5)  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(NotConfigured, match="nothing at all"):
        Container().get(Mail)
