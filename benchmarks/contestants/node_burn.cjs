// The handler of CPU-bound jobs: 5 ms of CPU, as in `harness.py`. A file of its own, so that bullmq can run it in a child process.
module.exports = async () => {
  const used = () => { const { user, system } = process.cpuUsage(); return user + system; };
  const end = used() + 5000;
  while (used() < end);
  return null;
};
