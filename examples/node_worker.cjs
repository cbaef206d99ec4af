// A Node worker for the queue "emails" of shop.py: node node_worker.cjs
const { Worker } = require("bullmq");

const worker = new Worker("emails", async (job) => ({ "sent to": `${job.data.to}, by Node` }), {
  connection: { url: process.env.BULLPEN_REDIS_URL ?? "redis://localhost:6379" },
});
worker.on("ready", () => console.log("ready"));
worker.on("completed", (job) => console.log("done", job.id));
