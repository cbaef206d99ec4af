// Workers of npm `bullmq` that have nothing to do, as `idle_bench.py`.
//   node idle_bench.mjs <directory with node_modules> <url> <queues> <seconds>

import { createRequire } from 'node:module';

const load = createRequire(`${process.argv[2]}/package.json`);
const { Worker } = load('bullmq');
const Redis = load('ioredis');
const { hostname, port } = new URL(process.argv[3]);
const [queues, seconds] = process.argv.slice(4).map(Number);
const connection = new Redis({ host: hostname, port: Number(port), maxRetriesPerRequest: null });
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const SETTLING_MS = 6000;

for (let i = 0; i < queues; i++) new Worker(`idle-${i}`, async () => {}, { connection });
await pause(SETTLING_MS);
console.log('ready');
const before = process.cpuUsage();
await pause(seconds * 1000);
const used = process.cpuUsage(before);
console.log((used.user + used.system) / 1e6);
