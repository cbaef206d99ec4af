// A worker of npm bullmq that keeps the same books as ours (`arena.Books`). Started by `schedules`.
import fs from "node:fs";
import { createRequire } from "node:module";

const require = createRequire(process.cwd() + "/");
const { Worker } = require("bullmq");
const order = JSON.parse(process.argv[2]);
const { hostname: host, port } = new URL(order.url);
const runs = fs.openSync(order.runs, "a");
const book = fs.openSync(order.book, "a");
const seconds = () => Number(process.hrtime.bigint()) / 1e9;
const write = (kind, job) => fs.writeSync(runs, JSON.stringify([kind, job.id, job.attemptsStarted, process.pid, seconds(), ""]) + "\n");

const worker = new Worker(
  order.queue,
  async (job) => {
    fs.writeSync(book, JSON.stringify({ ran: job.id, fence: null, pid: process.pid }) + "\n");
    write("begin", job);
    if (job.data.ms) await new Promise((done) => setTimeout(done, job.data.ms));
    write("end", job);
    return {};
  },
  {
    connection: { host, port: Number(port), maxRetriesPerRequest: null },
    concurrency: order.concurrency,
    lockDuration: order.lock,
    stalledInterval: order.stalledInterval,
  },
);
worker.on("error", (error) => console.error(String(error)));
process.on("SIGTERM", () => worker.close().then(() => process.exit(0)));
worker.waitUntilReady().then(() => console.log("ready"));
