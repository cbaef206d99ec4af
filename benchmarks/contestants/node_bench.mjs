// npm `bullmq`:   node node_bench.mjs <directory with node_modules> <task as JSON>
//
// The conversation, the roles and the fields of a task are those of `harness.py`. Unlike Python, V8 compiles what is hot,
// so every role first runs a while on a queue of its own.

import { createRequire } from 'node:module';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';

const BULK = 500;
const IN_FLIGHT = 100;
const SLEEP_MS = 10;
const PAUSE_BETWEEN_ASKS_MS = 3;
const ASKS_TO_WARM_UP = 20;
const JOBS_TO_WARM_UP = 1000;
const BURN_FILE = fileURLToPath(new URL('./node_burn.cjs', import.meta.url));

const load = createRequire(`${process.argv[2]}/package.json`);
const { Queue, QueueEvents, Worker } = load('bullmq');
const burn = load(BURN_FILE);
const task = { queue: 'bench', how: 'bulk', handler: 'noop', concurrency: 1, payload_bytes: 100, attempts: 1,
  due_at: null, variant: [], ...JSON.parse(process.argv[3]) };
const { hostname, port } = new URL(task.url);
const connection = { host: hostname, port: Number(port), maxRetriesPerRequest: null };
const data = { p: 'x'.repeat(Math.max(0, task.payload_bytes - '{"p":""}'.length)) };

const now = () => Number(process.hrtime.bigint()) / 1e9;
const say = (fields) => process.stdout.write(JSON.stringify(fields) + '\n');
const cpuSeconds = () => { const used = process.cpuUsage(); return (used.user + used.system) / 1e6; };
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

let heardGo;
const go = new Promise((resolve) => { heardGo = resolve; });
let heardEnd;
const end = new Promise((resolve) => { heardEnd = resolve; });
const input = createInterface({ input: process.stdin });
input.on('line', () => heardGo());
input.on('close', () => heardEnd());

let made = 0;
const ownOptions = () => {
  const n = made++;
  return { attempts: 5, delay: 600_000 + n, priority: (n % 10) + 1, jobId: `order-${process.pid}-${n}` };
};
const options = () => task.variant.includes('own_options') ? ownOptions() : ({
  attempts: task.attempts,
  ...(task.variant.includes('backoff') ? { backoff: { type: 'exponential', delay: 1000 } } : {}),
  ...(task.due_at === null ? {} : { delay: Math.max(0, Math.round(task.due_at * 1000 - Date.now())) }),
});

async function addAll(queue, how, count) {
  const ids = [];
  if (how === 'bulk') {
    for (let done = 0; done < count; done += BULK) {
      const size = Math.min(BULK, count - done);
      const jobs = await queue.addBulk(Array.from({ length: size }, () => ({ name: 'bench', data, opts: options() })));
      for (const job of jobs) ids.push(job.id);
    }
  } else if (how === 'in_flight') {
    let next = 0;
    const lane = async () => { while (next++ < count) ids.push((await queue.add('bench', data, options())).id); };
    await Promise.all(Array.from({ length: IN_FLIGHT }, lane));
  } else {
    for (let i = 0; i < count; i++) ids.push((await queue.add('bench', data, options())).id);
  }
  return ids;
}

async function add() {
  const warmUp = new Queue('warm', { connection });
  await addAll(warmUp, task.how, JOBS_TO_WARM_UP);
  const queue = new Queue(task.queue, { connection });
  await queue.waitUntilReady();
  say({ ready: true });
  await go;

  const cpu = cpuSeconds();
  const started = now();
  const ids = await addAll(queue, task.how, task.jobs);
  const seconds = now() - started;
  say({ seconds, cpu_s: cpuSeconds() - cpu, ids });
}

async function ask() {
  const queue = new Queue(task.queue, { connection });
  const events = new QueueEvents(task.queue, { connection });
  await Promise.all([queue.waitUntilReady(), events.waitUntilReady()]);
  say({ ready: true });
  await go;

  const cpu = cpuSeconds();
  const asked = [];
  for (let i = -ASKS_TO_WARM_UP; i < task.jobs; i++) {
    const began = now();
    const job = await queue.add('bench', { i });
    await job.waitUntilFinished(events);
    if (i >= 0) asked.push([began, now()]);
    await pause(PAUSE_BETWEEN_ASKS_MS);
  }
  say({ asked, cpu_s: cpuSeconds() - cpu });
}

function handlerOf(kind, tally) {
  const began = (job) => {
    tally.last_began = now();
    tally.first_began ||= tally.last_began;
    if (job.data.i !== undefined) tally.by_index.push([job.data.i, tally.last_began]);
  };
  switch (kind) {
    case 'burn': return (job) => { began(job); return burn(); };
    case 'sleep': return async (job) => { began(job); await pause(SLEEP_MS); return null; };
    case 'fail_once': return async (job) => {
      began(job);
      if (job.attemptsMade === 0) throw new Error('fails on purpose');
      return null;
    };
    default: return async (job) => { began(job); return null; };
  }
}

function startWorker(name, tally, kind, onCompleted) {
  const inChildren = task.variant.includes('processes'); // sandboxed: each running job has a process of its own
  const handler = inChildren ? BURN_FILE : handlerOf(kind, tally);
  const worker = new Worker(name, handler, { connection, concurrency: task.concurrency });
  worker.on('error', (error) => { console.error(error); process.exit(1); });
  if (inChildren) worker.on('active', () => { tally.first_began ||= now(); });
  worker.on('completed', onCompleted);
  return worker;
}

const newTally = () => ({ count: 0, first_began: 0, last_began: 0, last_ended: 0, goal_at: 0, by_index: [] });

async function warmUpWorker() {
  const queue = new Queue(`warm-${process.pid}`, { connection });
  const count = task.handler === 'burn' ? 10 : JOBS_TO_WARM_UP;
  await addAll(queue, 'bulk', count);
  let left = count;
  await new Promise((resolve) => {
    const worker = startWorker(queue.name, newTally(), task.handler, () => {
      if (--left === 0) worker.close().then(resolve);
    });
  });
  await queue.close();
}

async function work() {
  await warmUpWorker();
  const tally = newTally();
  say({ ready: true });
  await go;

  const cpu = cpuSeconds();
  startWorker(task.queue, tally, task.handler, () => {
    tally.last_ended = now();
    if (++tally.count === task.jobs) tally.goal_at = tally.last_ended;
  });
  let told = -1;
  const report = () => {
    if (tally.count === told) return;
    told = tally.count;
    const { by_index, ...instants } = tally;
    say({ ...instants, cpu_s: cpuSeconds() - cpu });
  };
  setInterval(report, 100);
  await end;
  report();
  say({ began_by_index: tally.by_index });
}

await { add, ask, work }[task.role]();
process.stdout.write('', () => process.exit(0));
