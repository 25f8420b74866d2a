"""Bugs that somebody might write where there are several engines."""

from __future__ import annotations

from functools import partial

from tests.simulation.planted_bugs import Bug

_frontend = partial(Bug, world="cluster", package="frontend")
_scheduler = partial(Bug, world="cluster")

CLUSTER_BUGS = [
    _frontend(
        "a moved completion keeps its number",
        "engines/pool.py",
        "        records = engine.client.release(streams)\n        self._streams.number(streams)\n",
        "        records = engine.client.release(streams)\n",
    ),
    _frontend(
        "a released completion is not aborted",
        "scheduler_client.py",
        "            self._bind(stream)\n            self.close(stream)\n",
        "            self._bind(stream)\n            self._drop(stream.number)\n",
    ),
    _frontend(
        "what is known of a suspect is not handed over",
        "suspects.py",
        "        return self._records.pop(number, None)\n",
        "        self._records.pop(number, None)\n        return None\n",
    ),
    _frontend(
        "a promise is not withdrawn",
        "engines/engine.py",
        "                index.withdraw(self.number, fit.missing)\n",
        "                pass\n",
    ),
    _frontend(
        "tokens to compute are counted for ever where a completion has left",
        "scheduler_client.py",
        "        if stream is not None:\n            stream.settle()\n        return stream\n",
        "        return stream\n",
    ),
    _frontend(
        "an engine that is forgotten keeps a block",
        "engines/prefix_index.py",
        "        for name in self._names.pop(engine, {}).values():\n",
        "        for name in list(self._names.pop(engine, {}).values())[1:]:\n",
    ),
    _frontend(
        "strangers are submitted",
        "scheduler_client.py",
        "            or (number in self._open and self.is_stranger(self._open[number]))\n",
        "",
    ),
    _frontend(
        "strangers are tried",
        "scheduler_client.py",
        "if not self.is_stranger(self._open[n])}",
        "}",
    ),
    _frontend(
        "a completion with tokens goes to any model",
        "engines/engine.py",
        '        return fits and model_fingerprint in ("", self.client.model_fingerprint)\n',
        "        return fits\n",
    ),
    _frontend(
        "each completion of a request has a model of its own",
        "scheduler_client.py",
        "for each in stream.group if each.model_fingerprint)",
        "for each in [stream] if each.model_fingerprint)",
    ),
    _frontend(
        "a completion is bound to no model when its engine is lost",
        "scheduler_client.py",
        "        for stream in self._open.values():\n            self._bind(stream)\n",
        "",
    ),
    _frontend(
        "a moved request loses a completion",
        "scheduler_client.py",
        "in zip(streams, records, strict=True):",
        "in zip(streams[:2], records):",
    ),
    _frontend(
        "what is refused is tried at the same engine again",
        "engines/pool.py",
        "        tried.add(engine)\n",
        "",
    ),
    _frontend(
        "what is refused is not tried elsewhere",
        "engines/pool.py",
        "        others = [each for each in self._serving() if each not in tried]\n",
        "        others: list[Engine] = []\n",
    ),
    _frontend(
        "what was lost twice in a row is moved",
        "engines/pool.py",
        "        return not hurt or engine.lost_for(",
        "        return True or engine.lost_for(",
    ),
    _frontend(
        "what was lost twice in a row leaves before the workers are back",
        "engines/pool.py",
        "_RETURN_S if recovers else _PATIENCE_S",
        "_PATIENCE_S",
    ),
    _frontend(
        "what was accepted may be refused where it moves",
        "scheduler_client.py",
        "                    self._submission(stream, resubmitted=True, expected",
        "                    self._submission(stream, expected",
    ),
    _frontend(
        "an engine that left the list keeps its streams",
        "engines/engine.py",
        "        return self.listed and self.client.serving\n",
        "        return self.client.serving\n",
    ),
    _frontend(
        "an engine that left the list is never let go",
        "engines/pool.py",
        "                    self._let_go(place, engine)\n",
        "                    pass\n",
    ),
    _frontend(
        "the watch of a cache ends with its connection",
        "engine_calls.py",
        "            if task is None or task.cancelling():\n                raise\n",
        "            raise\n",
    ),
    _frontend(
        "blocks stay orphans when the one before them is back",
        "engines/prefix_index.py",
        "            found += orphans.take(block.name)\n",
        "",
    ),
    _frontend(
        "everything goes to the first engine",
        "engines/placement.py",
        "        if load.num_sequences <= limit\n",
        "        if place == 0\n",
    ),
    _scheduler(
        "who watches the cache is not told that it was lost",
        "block_manager.py",
        "            watch.add(Cleared())\n",
        "            pass\n",
    ),
    _scheduler(
        "frontends are not told that workers are lost",
        "server.py",
        "        self._tell(self._state._replace(serving=serving))\n",
        "        pass\n",
    ),
]
