"""All scenes, in the order in which they are played."""

from tests.frames import scenes_adding, scenes_managing, scenes_timed, scenes_working

SCENES = [
    *scenes_adding.SCENES,
    *scenes_managing.SCENES,
    *scenes_timed.SCENES,
    *scenes_working.SCENES,
]
