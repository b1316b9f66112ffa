"""Builds of templates have a network default of their own."""

import time

from boxkit import wait_for
from sandkeep_server import Server
from servers import boxes_of, in_place_of


def test_builds_reach_the_package_registries_and_sandboxes_do_not(server, outside, monkeypatch):
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", f"http://good.sandkeep.test:{outside.web.port}/")
    recipe = {"steps": [{"run": f"curl -sSf {outside.url()}"}]}
    with in_place_of(server, "--pool-size", "0", *outside.flags(), where=outside.where()) as own:
        assert built(own, recipe)["status"] == "ready"
        with boxes_of(own) as make:
            assert make().exec(["curl", "-sS", outside.url()]).code == 6, "not found: it has no rule"
    flags = ["--build-network-default", "deny", *outside.flags()]
    with in_place_of(server, "--pool-size", "0", *flags, where=outside.where()) as own:
        assert built(own, {**recipe, "no_cache": True})["status"] == "failed"


def built(server: Server, recipe: dict) -> dict:
    name = f"net{time.monotonic_ns()}"
    begun = server.json("POST", f"/v1/templates/{name}/builds", recipe)
    path = f"/v1/templates/{name}/builds/{begun['id']}"
    ended = wait_for(lambda: (now := server.json("GET", path))["ended_at"] and now, "the build ends", 120)
    if ended["status"] == "ready":
        server.json("DELETE", f"/v1/templates/{name}")
    return ended
