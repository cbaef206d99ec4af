// The handler of CPU-bound jobs, run by bullmq in a child process: 5 ms of CPU, as in `harness.py`.
module.exports = async () => {
  const used = () => { const { user, system } = process.cpuUsage(); return user + system; };
  const end = used() + 5000;
  while (used() < end);
  return null;
};
