"""Sealed payloads, made and opened by npm `bullmq` with the code of the page about the envelope, in both directions."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from bullpen import Codec, FileStore, Job, Queue, Worker
from bullpen.wire.envelope import Envelope

from ._node import NODE_DIR, NodeTools

PAGE = (Path(__file__).parents[2] / "docs/reference/envelope.md").read_text()
KEYS = {"k2": bytes(range(32, 64)), "k1": bytes(range(32))}
DATA = {"text": "grüße 👋", "number": 1.5, "list": [None, True]}

PROGRAM = """
import { createRequire } from 'node:module';
import { open, seal } from './payloads.mjs';

const { Queue, QueueEvents, Worker } = createRequire(process.env.NODE_DIR + '/')('bullmq');
const [action, name, url, directory] = process.argv.slice(2);
const { hostname: host, port } = new URL(url);
const connection = { host, port: Number(port), maxRetriesPerRequest: null };
const keys = Object.fromEntries(
  Object.entries(JSON.parse(process.env.KEYS)).map(([id, key]) => [id, Buffer.from(key, 'base64')]));

if (action === 'add') {
  const queue = new Queue(name, { connection });
  const events = new QueueEvents(name, { connection });
  await events.waitUntilReady();
  const sealed = seal(JSON.parse(process.env.DATA), { queue: queue.qualifiedName, keyId: 'k1', keys });
  const job = await queue.add('echo', sealed);
  const result = await job.waitUntilFinished(events);
  const opened = await open(result, { queue: queue.qualifiedName, keys, kind: 'result' });
  console.log(JSON.stringify({ id: job.id, result, opened }));
  await events.close();
  await queue.close();
} else {
  const worker = new Worker(name, async job => {
    const queue = job.queueQualifiedName;
    const data = await open(job.data, { queue, keys, directory });
    return seal({ got: data }, { queue, keyId: 'k1', keys, kind: 'result' });
  }, { connection });
  let left = Number(process.env.COUNT);
  const ended = new Promise(resolve => worker.on('completed', () => --left || resolve()));
  worker.on('failed', (job, error) => { console.error(error); process.exit(1); });
  await ended;
  await worker.close();
}
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    block = re.search(r"^```mjs\n(// payloads\.mjs\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert block is not None
    (tmp_path / "payloads.mjs").write_text(block[1])
    (tmp_path / "program.mjs").write_text(PROGRAM)
    return tmp_path / "program.mjs"


async def run_node(tools: NodeTools, program: Path, *arguments: str, **variables: str) -> str:
    environment = {
        **os.environ,
        "NODE_DIR": str(NODE_DIR),
        "KEYS": json.dumps({key_id: b64encode(key).decode() for key_id, key in KEYS.items()}),
        **variables,
    }
    done = await asyncio.to_thread(
        subprocess.run,
        [*tools.node, str(program), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_node_opens_what_we_seal_and_we_open_its_result(
    interop_url: str, node_tools: NodeTools, program: Path, tmp_path: Path, queue_name: str
) -> None:
    """Encrypted, encrypted in the store, with either key, and plain: one worker of Node takes all."""
    store = FileStore(tmp_path / "payloads")
    both = Codec(KEYS, store=store, above=1_000)
    large = {**DATA, "large": "ü" * 5_000}
    async with (
        Queue(queue_name, connection=interop_url, codec=both) as queue,
        Queue(queue_name, connection=interop_url, codec=Codec(KEYS, current="k1")) as older,
        Queue(queue_name, connection=interop_url, codec=Codec(store=store, above=1_000)) as unencrypted,
        Queue(queue_name, connection=interop_url) as plain,
    ):
        jobs = [await adding.add("echo", DATA) for adding in (queue, older, plain)]
        jobs += [await adding.add("echo", large) for adding in (queue, unencrypted)]

        await run_node(node_tools, program, "work", queue_name, interop_url, str(tmp_path / "payloads"), COUNT="5")

        results = [await queue._ready().wait_result(job.id, 10_000) for job in jobs]
        assert results == [{"got": DATA}] * 3 + [{"got": large}] * 2


async def test_we_open_what_node_seals_and_it_opens_our_result(
    interop_url: str, node_tools: NodeTools, program: Path, queue_name: str
) -> None:
    seen: list[Any] = []

    async def echo(job: Job) -> Any:
        seen.append(job.data)
        return job.data

    async with Worker(queue_name, echo, connection=interop_url, codec=Codec(KEYS, refuse_plain=True)):
        printed = json.loads(await run_node(node_tools, program, "add", queue_name, interop_url, DATA=json.dumps(DATA)))

    assert seen == [DATA] == [printed["opened"]]
    assert printed["result"]["bpcodec"]["kid"] == "k2"


def test_the_example_of_the_page_is_what_we_read() -> None:
    """Whoever implements it elsewhere begins with this."""
    example = re.search(r"^```json\n(.*?)\n```$", PAGE, re.MULTILINE)
    assert example is not None
    envelope = Envelope.parse(example[1].encode())

    assert envelope.to_bytes() == example[1].encode()
    assert Codec({"k1": KEYS["k1"]}).decrypt(envelope, envelope.box or b"", "data", "it") == b'{"iban":"DE89"}'
