// Drives npm `bullmq` for the interop tests: one JSON object per line on stdin, one per line on stdout.
//
//   request   {"id": 1, "op": "add", "queue": "q", "name": "n", "data": {}, "opts": {}}
//   answer    {"id": 1, "ok": ...} or {"id": 1, "error": {"name": ..., "message": ...}}
//   event     {"event": "worker" | "queueEvents" | "error", ...}
//
// Started as `node driver.mjs <redis url> [package]`, the package being `bullmq` unless named; says {"event": "ready"} once. A failing op never ends the process: only the end
// of stdin does. What a worker does with a job is data (see `play`), so that every side of a test runs the same script.

import { createInterface } from 'node:readline';
import IORedis from 'ioredis';

const {
  DelayedError, FlowProducer, Queue, QueueEvents, QueueEventsProducer, UnrecoverableError, WaitingChildrenError, WaitingError, Worker,
} = await import(process.argv[3] ?? 'bullmq');
const url = process.argv[2];
const say = (message) => process.stdout.write(JSON.stringify(message) + '\n');
const describe = (error) => ({ name: error?.name ?? 'Error', message: String(error?.message ?? error) });
const reportError = (source) => (error) => say({ event: 'error', source, ...describe(error) });

function connect() {
  const options = { maxRetriesPerRequest: null };
  const client = url.startsWith('unix://') ? new IORedis(url.slice('unix://'.length), options) : new IORedis(url, options);
  client.on('error', reportError('connection'));
  return client;
}

let shared = connect(); // commands of queues, flows and plain redis ops; blocking connections are bullmq's own duplicates
const queues = new Map();
const flows = new Map();
const workers = new Map();
const listeners = new Map();

function queueOf({ queue, prefix = 'bull', queueOpts = {} }) {
  const key = `${prefix}:${queue}`;
  if (!queues.has(key)) {
    const made = new Queue(queue, { connection: shared, prefix, ...queueOpts });
    made.on('error', reportError(`queue ${key}`));
    queues.set(key, made);
  }
  return queues.get(key);
}

function flowOf({ prefix = 'bull' }) {
  if (!flows.has(prefix)) {
    const made = new FlowProducer({ connection: shared, prefix });
    made.on('error', reportError('flow'));
    flows.set(prefix, made);
  }
  return flows.get(prefix);
}

async function jobOf(request) {
  const job = await queueOf(request).getJob(request.jobId);
  if (!job) throw new Error(`no job ${request.jobId} in queue ${request.queue}`);
  return job;
}

// --- what a worker does with a job ---------------------------------------------------------------------------------------

const later = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// Steps, each optional, in this order: `progress` (list), `logs` (list), `sleep` (ms), `hold` (until the op `release`), then `kind`.
async function play(behaviour, job, token, slot, signal) {
  const step = behaviour.byName?.[job.name] ?? behaviour;
  for (const value of step.progress ?? []) await job.updateProgress(value);
  for (const line of step.logs ?? []) await job.log(line);
  if (step.sleep) await later(step.sleep);
  if (step.hold) await held(slot, job.id);
  const message = step.message ?? 'boom';
  const firstStart = job.attemptsStarted === 1;
  switch (step.kind ?? 'echo') {
    case 'echo':
      return { echo: job.data };
    case 'return':
      return step.value;
    case 'fail_times':
      if (job.attemptsMade < step.times) throw new Error(message);
      return step.value ?? { attemptsMade: job.attemptsMade };
    case 'die':
      process.exit(1);
    case 'always_fail':
      throw new Error(message);
    case 'unrecoverable':
      throw new UnrecoverableError(message);
    case 'delay_once':
      if (!firstStart) return step.value;
      await job.moveToDelayed(Date.now() + step.ms, token);
      throw new DelayedError();
    case 'rate_limit_once':
      if (!firstStart) return step.value;
      await slot.worker.rateLimit(step.ms);
      throw Worker.RateLimitError();
    case 'wait_once':
      if (!firstStart) return step.value;
      await job.moveToWait(token);
      throw new WaitingError();
    case 'wait_children':
      if (await job.moveToWaitingChildren(token)) throw new WaitingChildrenError();
      return { children: await job.getChildrenValues(), ignored: await job.getIgnoredChildrenFailures() };
    case 'children':
      return { children: await job.getChildrenValues(), ignored: await job.getIgnoredChildrenFailures() };
    case 'until_aborted':
      say({ event: 'worker', worker: slot.id, type: 'held', jobId: job.id });
      if (!signal.aborted) await new Promise((resolve) => { signal.onabort = resolve; });
      throw new UnrecoverableError(`cancelled: ${signal.reason}`);
    case 'drop_children':
      await job.removeUnprocessedChildren();
      return { ignored: await job.getIgnoredChildrenFailures() };
    default:
      throw new UnrecoverableError(`unknown kind ${step.kind}`);
  }
}

const held = (slot, jobId) => new Promise((resolve) => {
  if (slot.releaseAll) return resolve();
  slot.holds.set(jobId, resolve);
  say({ event: 'worker', worker: slot.id, type: 'held', jobId });
});

function release({ worker, jobId }) {
  const slot = workers.get(worker);
  if (!slot) throw new Error(`no worker ${worker}`);
  if (jobId == null) {
    slot.releaseAll = true;
    for (const resolve of slot.holds.values()) resolve();
    slot.holds.clear();
    return true;
  }
  const resolve = slot.holds.get(jobId);
  slot.holds.delete(jobId);
  resolve?.();
  return resolve !== undefined;
}

async function startWorker({ worker: id, queue, prefix = 'bull', behaviour = {}, opts = {} }) {
  const slot = { id, holds: new Map(), releaseAll: false };
  const { backoffMs, ...rest } = opts; // a function cannot be sent: this one answers the same pause for every type
  const settings = backoffMs === undefined ? {} : { settings: { backoffStrategy: () => backoffMs } };
  slot.worker = new Worker(queue, (job, token, signal) => play(behaviour, job, token, slot, signal), { connection: shared, prefix, ...rest, ...settings });
  const tell = (type, fields) => say({ event: 'worker', worker: id, type, ...fields });
  slot.worker.on('active', (job) => tell('active', { jobId: job.id, attemptsMade: job.attemptsMade }));
  slot.worker.on('completed', (job, value) => tell('completed', { jobId: job.id, value }));
  slot.worker.on('failed', (job, error) => tell('failed', { jobId: job?.id, message: error.message, attemptsMade: job?.attemptsMade }));
  slot.worker.on('stalled', (jobId) => tell('stalled', { jobId }));
  slot.worker.on('drained', () => tell('drained', {}));
  slot.worker.on('lockRenewalFailed', (jobIds) => tell('lockRenewalFailed', { jobIds }));
  slot.worker.on('error', reportError(`worker ${id}`));
  workers.set(id, slot);
  await slot.worker.waitUntilReady();
  return slot.worker.id;
}

async function closeWorker({ worker: id, force = false }) {
  const slot = workers.get(id);
  workers.delete(id);
  await slot?.worker.close(force);
}

// "Ready" of QueueEvents means connected, not reading; starting after the stream's present end loses nothing in between.
async function startQueueEvents({ queue, prefix = 'bull', opts = {} }) {
  const key = `${prefix}:${queue}`;
  const [last] = await shared.xrevrange(`${key}:events`, '+', '-', 'COUNT', 1);
  const made = new QueueEvents(queue, { connection: shared, prefix, lastEventId: last?.[0] ?? '0-0', ...opts });
  const emit = made.emit.bind(made);
  made.emit = (type, ...args) => { // every event, known to bullmq or not
    if (type === 'error') reportError(`queueEvents ${key}`)(args[0]);
    else if (!String(type).includes(':')) say({ event: 'queueEvents', queue, type, args: args[0] ?? null, streamId: args[1] ?? null });
    return emit(type, ...args);
  };
  made.on('error', () => {});
  listeners.set(key, made);
  await made.waitUntilReady();
}

async function reset() {
  for (const id of [...workers.keys()]) {
    release({ worker: id });
    await closeWorker({ worker: id, force: true });
  }
  for (const kept of [listeners, flows, queues]) {
    for (const one of kept.values()) await one.close();
    kept.clear();
  }
}

const plain = (job) => (job ? { ...job.toJSON(), state: undefined } : null);
const tree = (node) => ({ id: node.job.id, queue: node.job.queueName, children: (node.children ?? []).map(tree) });

const ops = {
  ping: async () => 'pong',
  reset,
  closeWorker,
  release: async (r) => release(r),
  cancelJob: async (r) => workers.get(r.worker).worker.cancelJob(r.jobId, r.reason),
  startWorker,
  startQueueEvents,
  closeQueueEvents: async ({ queue, prefix = 'bull' }) => {
    const key = `${prefix}:${queue}`;
    await listeners.get(key)?.close();
    listeners.delete(key);
  },
  redis: async ({ command }) => shared.call(...command),
  openQueue: async (r) => (await queueOf(r).waitUntilReady(), null),
  add: async (r) => (await queueOf(r).add(r.name, r.data, r.opts)).id,
  addBulk: async (r) => (await queueOf(r).addBulk(r.jobs)).map((job) => job.id),
  addFlow: async (r) => tree(await flowOf(r).add(r.flow)),
  getJob: async (r) => {
    const job = await queueOf(r).getJob(r.jobId);
    return job ? { ...plain(job), state: await job.getState() } : null;
  },
  getJobs: async (r) => (await queueOf(r).getJobs(r.types, r.start, r.end, r.asc)).map(plain),
  getState: async (r) => queueOf(r).getJobState(r.jobId),
  getChildrenValues: async (r) => (await jobOf(r)).getChildrenValues(),
  getDependencies: async (r) => (await jobOf(r)).getDependencies(),
  // The package that computes patterns, by itself: for each [pattern, zone, after ms, seed] the next ms, or null where it is refused.
  cronNext: async (r) => {
    const { CronExpressionParser } = await import('cron-parser');
    return r.asked.map(([pattern, tz, after, hashSeed]) => {
      try {
        return CronExpressionParser.parse(pattern, { currentDate: new Date(after), tz, hashSeed }).next().getTime();
      } catch {
        return null;
      }
    });
  },
  promote: async (r) => (await jobOf(r)).promote(),
  removeUnprocessedChildren: async (r) => (await jobOf(r)).removeUnprocessedChildren(),
  retryJob: async (r) => (await jobOf(r)).retry(r.state, r.opts),
  changeDelay: async (r) => (await jobOf(r)).changeDelay(r.delay),
  changePriority: async (r) => (await jobOf(r)).changePriority(r.opts),
  updateData: async (r) => (await jobOf(r)).updateData(r.data),
  log: async (r) => (await jobOf(r)).log(r.line),
  clearLogs: async (r) => (await jobOf(r)).clearLogs(r.keep),
  publishEvent: async (r) => {
    const producer = new QueueEventsProducer(r.queue, { connection: shared });
    await producer.publishEvent(r.args, r.maxEvents);
    await producer.close();
  },
  waitUntilFinished: async (r) => {
    const listener = listeners.get(`${r.prefix ?? 'bull'}:${r.queue}`);
    if (!listener) throw new Error('startQueueEvents first');
    return (await jobOf(r)).waitUntilFinished(listener, r.ttl);
  },
  remove: async (r) => queueOf(r).remove(r.jobId, r.opts),
  upsertJobScheduler: async (r) => (await queueOf(r).upsertJobScheduler(r.schedulerId, r.repeat, r.template))?.id,
};

// Ops that are one call of a Queue method with the positional arguments `args`.
const queueMethods = [
  'clean', 'count', 'drain', 'exportPrometheusMetrics', 'getCountsPerPriority', 'getDeduplicationJobId', 'getDelayedCount', 'getGlobalConcurrency', 'getJobCounts', 'getJobLogs',
  'getJobScheduler', 'getJobSchedulers', 'getMeta', 'getMetrics', 'getQueueEvents', 'getRanges', 'getVersion', 'getWorkers', 'getWorkersCount', 'isMaxed', 'isPaused',
  'obliterate', 'pause', 'promoteJobs', 'rateLimit', 'removeDeduplicationKey', 'removeGlobalConcurrency', 'removeGlobalRateLimit',
  'removeJobScheduler', 'removeOrphanedJobs', 'resume', 'retryJobs', 'setGlobalConcurrency', 'setGlobalRateLimit', 'trimEvents',
];
for (const name of queueMethods) ops[name] = async (r) => queueOf(r)[name](...(r.args ?? []));

async function answer(line) {
  let request;
  try {
    request = JSON.parse(line);
    if (!Object.hasOwn(ops, request.op)) throw new Error(`unknown op ${request.op}`);
    say({ id: request.id, ok: (await ops[request.op](request)) ?? null });
  } catch (error) {
    say({ id: request?.id ?? null, error: describe(error) });
  }
}

process.on('unhandledRejection', reportError('unhandled rejection'));
process.on('uncaughtException', reportError('uncaught exception'));

const lines = createInterface({ input: process.stdin });
lines.on('line', answer);
lines.on('close', async () => {
  setTimeout(() => process.exit(0), 2000).unref(); // a job that never ends must not keep the process
  await reset().catch(() => {});
  process.exit(0);
});
await shared.ping();
say({ event: 'ready', version: process.version });
