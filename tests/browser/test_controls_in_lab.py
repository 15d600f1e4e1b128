"""The controls of a picture, moved by hand in the page."""

from __future__ import annotations

import lab

COLLECTIVES = """
from ddp_kit.lessons import collectives
collectives.explore(world_size=2).interact()
"""
RING = """
from ddp_kit.lessons import ring_allreduce
ring_allreduce.explore(world_size=2).interact()
"""
NEW_PICTURE = """before => {
    const image = document.querySelector('.jp-OutputArea img.widget-image');
    return image?.naturalWidth > 100 && image.src !== before && image.src;
}"""


def test_a_menu_and_a_slider_run_again_and_redraw(open_notebook):
    document = open_notebook(lab.notebook(COLLECTIVES))
    document.run()
    first = document.wait(NEW_PICTURE, arg="")
    document.page.locator(".widget-dropdown select").first.select_option("broadcast")
    document.wait_for("kit.run(collectives.broadcast, 0, world_size=2)", cell=1)
    from_0 = document.wait(NEW_PICTURE, arg=first)
    root = document.page.locator(".widget-slider", has_text="root").locator(".noUi-handle")
    root.press("ArrowRight")
    document.wait_for("kit.run(collectives.broadcast, 1, world_size=2)", cell=1)
    document.wait(NEW_PICTURE, arg=from_0)
    assert document.dead_widgets() == []


def test_play_goes_through_the_steps_of_a_ring(open_notebook):
    document = open_notebook(lab.notebook(RING))
    document.run()
    picture = document.wait(NEW_PICTURE, arg="")
    document.page.locator(".widget-play button").first.click()
    for _ in range(2):
        picture = document.wait(NEW_PICTURE, arg=picture)
    assert document.dead_widgets() == []
