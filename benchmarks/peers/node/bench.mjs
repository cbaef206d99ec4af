// npm `bullmq`, one workload per run:
//
//   node bench.mjs <directory with node_modules> <redis url> <workload> <n> <concurrency> <payload bytes>
//
// Prints one JSON line; its fields are those of `benchmarks/peers/report.py`.

import { createRequire } from 'node:module';
import { performance } from 'node:perf_hooks';

const [modules, url, workload, nText, concurrencyText, payloadText] = process.argv.slice(2);
const load = createRequire(`${modules}/package.json`);
const { Queue, QueueEvents, Worker } = load('bullmq');
const { Redis } = load('ioredis');
const n = Number(nText);
const concurrency = Number(concurrencyText);
const data = { p: 'x'.repeat(Math.max(0, Number(payloadText) - '{"p":""}'.length)) };
const { hostname, port } = new URL(url);
const connection = { host: hostname, port: Number(port), maxRetriesPerRequest: null };
const observer = new Redis(connection);
const BULK = 500;
const IN_FLIGHT = 100;

async function addBulk(queue, count) {
  for (let done = 0; done < count; done += BULK) {
    const size = Math.min(BULK, count - done);
    await queue.addBulk(Array.from({ length: size }, () => ({ name: 'bench', data })));
  }
}

async function addOneByOne(queue, count, latencies = []) {
  for (let i = 0; i < count; i++) {
    const started = performance.now();
    await queue.add('bench', data);
    latencies.push(performance.now() - started);
  }
}

async function addInFlight(queue, count) {
  let next = 0;
  const lane = async () => {
    while (next++ < count) await queue.add('bench', data);
  };
  await Promise.all(Array.from({ length: IN_FLIGHT }, lane));
}

async function drain(name, count) {
  let worker;
  await new Promise((resolve, reject) => {
    let left = count;
    worker = new Worker(name, async () => null, { connection, concurrency });
    worker.on('completed', () => { if (--left === 0) resolve(); });
    worker.on('error', reject);
  });
  return worker;
}

async function latency(name, queue, count, toHandler, toResult) {
  let handlerStarted = 0;
  const worker = new Worker(name, async () => { handlerStarted = performance.now(); return null; }, { connection, concurrency });
  const events = new QueueEvents(name, { connection });
  await Promise.all([worker.waitUntilReady(), events.waitUntilReady()]);
  for (let i = 0; i < count; i++) {
    const started = performance.now();
    const job = await queue.add('bench', data);
    await job.waitUntilFinished(events);
    toResult.push(performance.now() - started);
    toHandler.push(handlerStarted - started);
  }
  await events.close();
  return worker;
}

async function serverCpuSeconds() {
  const text = await observer.info('cpu');
  const seconds = (field) => Number(new RegExp(`${field}:([\\d.]+)`).exec(text)[1]);
  return seconds('used_cpu_user') + seconds('used_cpu_sys');
}

const quantile = (values, q) => [...values].sort((a, b) => a - b)[Math.min(values.length - 1, Math.floor(values.length * q))];
const spread = (values) => ({ p50: quantile(values, 0.5), p99: quantile(values, 0.99) });

async function run(name, count, measured) {
  const queue = new Queue(name, { connection });
  await queue.waitUntilReady();
  if (workload === 'drain') await addBulk(queue, count);
  const serverBefore = await serverCpuSeconds();
  const cpuBefore = process.cpuUsage();
  const started = performance.now();

  const details = {};
  let worker;
  const first = [];
  const second = [];
  switch (workload) {
    case 'add_one_by_one': await addOneByOne(queue, count, first); break;
    case 'add_in_flight': await addInFlight(queue, count); break;
    case 'bulk_add': await addBulk(queue, count); break;
    case 'drain': worker = await drain(name, count); break;
    case 'latency': worker = await latency(name, queue, count, first, second); break;
    default: throw new Error(`unknown workload ${workload}`);
  }

  const seconds = (performance.now() - started) / 1000;
  const cpu = process.cpuUsage(cpuBefore);
  const serverCpu = (await serverCpuSeconds()) - serverBefore;
  if (measured) {
    if (workload === 'add_one_by_one') details.add_ms = spread(first);
    if (workload === 'latency') Object.assign(details, { to_handler_ms: spread(first), to_result_ms: spread(second) });
    const counts = await queue.getJobCounts('waiting', 'completed');
    console.log(JSON.stringify({
      jobs: counts.waiting + counts.completed,
      seconds,
      jobs_per_s: count / seconds,
      cpu_s: (cpu.user + cpu.system) / 1e6,
      server_cpu_s: serverCpu,
      ...details,
    }));
  }
  await worker?.close();
  await queue.close();
}

await run('bench-warmup', Math.min(1000, Math.ceil(n / 10)), false);
await run('bench', n, true);
process.exit(0);
