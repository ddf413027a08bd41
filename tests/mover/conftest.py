import pytest
from mover_kit import Inbox

from tiercache.mover import Mover


@pytest.fixture
def inbox():
    return Inbox()


@pytest.fixture
def make_mover(inbox):
    """`make_mover(*tiers, **options)`; closed at the end, whatever the test left running."""
    made = []

    def make(*tiers, **options):
        options.setdefault("commit_every_s", 0.02)
        mover = Mover(tiers, inbox, **options)
        made.append((mover, tiers))
        return mover

    yield make
    for mover, tiers in made:
        for tier in tiers:
            if hasattr(tier, "wake"):
                tier.wake()
        mover.close(5.0)
