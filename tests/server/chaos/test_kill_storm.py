"""Thirty times kill -9 at a random moment under load; nothing acknowledged is lost without a reason, nothing is left behind."""

import os
import random
import threading
import time
from pathlib import Path

import living
from boxkit import Box, wait_for
from sandkeep_server import Refused

ROUNDS = 30


class Load:
    """Clients that create, use and kill boxes, and remember what the server promised."""

    def __init__(self, server):
        self.server = server
        self.acknowledged: set[str] = set()
        self.killed: set[str] = set()
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self.work, args=(n,), daemon=True) for n in range(4)]

    def work(self, seed):
        chance = random.Random(seed)
        mine: list[Box] = []
        while not self.stop.is_set():
            try:
                if len(mine) < 6 or chance.random() < 0.4:
                    box = Box(self.server, timeout_seconds=None, metadata={"storm": str(seed)})
                    with self.lock:
                        self.acknowledged.add(box.id)
                    mine.append(box)
                elif chance.random() < 0.5:
                    chance.choice(mine).exec("echo x >> /tmp/x")
                else:
                    box = mine.pop(chance.randrange(len(mine)))
                    with self.lock:
                        self.killed.add(box.id)
                    self.server.json("DELETE", box.path)
            except (OSError, Refused, ValueError):
                time.sleep(0.02)
            except Exception:  # noqa: BLE001 http.client raises many kinds when the server dies mid-answer
                time.sleep(0.02)


def test_kill_storm(server):
    server.end_boxes()
    mounts_before = Path("/proc/mounts").read_text().count(str(server.state))
    load = Load(server)
    for thread in load.threads:
        thread.start()
    chance = random.Random(os.environ.get("SANDKEEP_STORM_SEED", "storm"))
    for _ in range(ROUNDS):
        time.sleep(chance.uniform(0.05, 0.6))
        server.kill_hard()
        server.start()
    load.stop.set()
    for thread in load.threads:
        thread.join(60)
        assert not thread.is_alive()

    answered, gone, lost = 0, 0, []
    for identity in load.acknowledged:
        info = server.json("GET", f"/v1/sandboxes/{identity}")
        if info["state"] == "gone":
            assert info["gone"]["reason"], info
            gone += 1
            if identity not in load.killed:
                lost.append(info)
            continue
        assert info["state"] == "running", info
        box = Box.__new__(Box)
        box.server, box.id, box.path = server, identity, f"/v1/sandboxes/{identity}"
        assert box.exec("echo here").out == "here\n"
        answered += 1
    print(f"acknowledged {len(load.acknowledged)}, running and answering {answered}, gone with a reason {gone}")
    assert len(load.acknowledged) > 20
    assert not lost, lost[:3]

    # What runs is exactly what the ledger knows.
    known = wait_for(lambda: known_and_pooled(server), "the pool is full again")
    wait_for(lambda: len(living.agents(server)) == known, f"{known} agents, no orphan")
    server.end_boxes()
    for _ in range(20):
        if not server.json("GET", "/v1/sandboxes")["sandboxes"]:
            break
        server.end_boxes()
    pooled = server.json("GET", "/v1/host")["pooled"]
    wait_for(lambda: len(living.agents(server)) == server.json("GET", "/v1/host")["pooled"], "only the pool is left")
    assert Path("/proc/mounts").read_text().count(str(server.state)) == mounts_before
    roots = [p for p in Path(server.state).glob("pool/*/i*") if len(p.name) == 21]
    wait_for(lambda: len([p for p in Path(server.state).glob("pool/*/i*") if len(p.name) == 21]) <= pooled + 1, f"roots of gone boxes, seen {len(roots)}")


def known_and_pooled(server):
    host = server.json("GET", "/v1/host")
    if host["pooled"] < 3:
        return None
    total, token = 0, ""
    while True:
        page = server.json("GET", "/v1/sandboxes?limit=100" + (f"&next_token={token}" if token else ""))
        total += len(page["sandboxes"])
        token = page.get("next_token")
        if not token:
            return total + host["pooled"]


def test_nothing_is_left_when_all_boxes_are_gone(server):
    """Cgroups and namespaces after many lives: as many as there are boxes."""
    server.end_boxes()
    wait_for(lambda: server.json("GET", "/v1/host")["pooled"] >= 3, "the pool is full")
    wait_for(lambda: len(living.agents(server)) == 3, "three agents")
    before = len(living.network_namespaces(server))
    groups = len(living.cgroups(server))
    for _ in range(10):
        with Box(server) as box:
            box.exec("true")
    wait_for(lambda: server.json("GET", "/v1/host")["pooled"] >= 3, "the pool is full")
    wait_for(lambda: len(living.agents(server)) == 3, "three agents")
    wait_for(lambda: len(living.network_namespaces(server)) <= before, "namespaces go", limit=30)
    wait_for(lambda: len(living.cgroups(server)) <= groups, "cgroups go", limit=30)
