"""The event stream."""

import http.client
import json


def stream(server, path, headers=None, until=None, limit=200, once_open=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", path, headers={"X-API-Key": server.key, **(headers or {})})
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.getheader("content-type").startswith("text/event-stream")
    if once_open:
        once_open()
    events, current = [], {}
    for _ in range(limit):
        line = answer.readline().decode().rstrip("\n")
        if line.startswith("id:"):
            current["id"] = line[3:].strip()
        elif line.startswith("data:"):
            current["data"] = json.loads(line[5:])
        elif not line and "data" in current:
            events.append(current)
            if until and until(current["data"]):
                break
            current = {}
    connection.close()
    return events


def steps(events, box):
    return [e["data"]["to"] for e in events if e["data"]["event"] == "state" and e["data"]["sandbox_id"] == box.id]


def test_a_whole_life(server, make):
    box = make()
    box.kill()
    events = stream(server, f"/v1/events?after=0&sandbox_id={box.id}", until=lambda e: e.get("to") == "gone")
    assert steps(events, box)[-3:] == ["running", "stopping", "gone"]
    assert events[-1]["data"]["why"]["reason"] == "killed"
    sequence = [e["data"]["seq"] for e in events]
    assert sequence == sorted(set(sequence))


def test_reading_on_after_a_break(server, make):
    box = make()
    box.kill()
    path = f"/v1/events?after=0&sandbox_id={box.id}"
    events = stream(server, path, until=lambda e: e.get("to") == "gone")
    rest = stream(
        server, f"/v1/events?sandbox_id={box.id}", headers={"Last-Event-ID": events[0]["id"]}, until=lambda e: e.get("to") == "gone"
    )
    assert [e["id"] for e in rest] == [e["id"] for e in events[1:]]


def test_live(server, make):
    box = make()
    events = stream(server, f"/v1/events?sandbox_id={box.id}", until=lambda e: e.get("to") == "gone", once_open=box.kill)
    assert steps(events, box)[-1] == "gone"


def test_without_following_it_ends_with_what_there_is(server, make):
    box = make()
    box.kill()
    # The server ends the stream: reading to its end comes back by itself.
    status, headers, body = server.request("GET", f"/v1/events?after=0&follow=false&sandbox_id={box.id}")
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    told = [json.loads(line[5:]) for line in body.decode().splitlines() if line.startswith("data:")]
    assert [event["to"] for event in told if event["event"] == "state"][-3:] == ["running", "stopping", "gone"]
    assert server.request("GET", f"/v1/events?follow=false&sandbox_id={box.id}")[2] == b""
    assert server.request("GET", "/v1/events?follow=maybe")[0] == 400
