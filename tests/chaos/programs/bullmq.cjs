// BullMQ on Node: producer and worker as common.py and peer.py have them, for the one queue that is
// not Python. Unless it is left at its defaults it is set up as its page "Going to production" says:
// adds fail at once while there is no server, workers wait for it, and completed jobs are removed.
'use strict';
const path = require('path');
const modules = path.join(__dirname, '..', '..', '..', '.venv-bench-node', 'node_modules');
const { Queue, Worker } = require(path.join(modules, 'bullmq'));
const fs = require('fs');

const BULK = 20;
const ADD_MS = 10_000;
const PAUSE_MS = 100;
const told = JSON.parse(process.env.CHAOS_TOLD);
const { hostname, port } = new URL(told.url);
const connection = { host: hostname, port: Number(port) };
const safe = (options) => (told.is_default ? {} : options);
const sleep = (ms) => new Promise((wake) => setTimeout(wake, ms));

const book = fs.openSync(path.join(told.folder, `${process.pid}.ledger`), 'a', 0o600);
const nowS = () => (Number(process.hrtime.bigint()) / 1e9).toFixed(6); // Python's monotonic()
const write = (kind, numbers) =>
  fs.writeSync(book, numbers.map((n) => `${kind} ${n} ${told.who} ${nowS()}\n`).join(''));

const takesMs = (n) => Number((((BigInt(n) * 2654435761n) % 4294967296n) / 1000n) % 100n);

function allowed(gate) {
  const bytes = Buffer.alloc(8);
  fs.readSync(gate, bytes, 0, 8, 0);
  return Number(bytes.readBigUInt64LE());
}

async function outcomeOf(adding) {
  const late = sleep(ADD_MS).then(() => 'unknown');
  return Promise.race([adding.then(() => 'ok', () => 'unknown'), late]);
}

async function produce() {
  const queue = new Queue(told.queue, {
    connection: { ...connection, ...safe({ enableOfflineQueue: false }) },
  });
  queue.on('error', () => {});
  const gate = fs.openSync(path.join(told.folder, 'gate'), 'r');
  const [first, last] = told.numbers;
  for (let start = first; start < last; start += BULK) {
    while ((start - told.origin) * told.producers >= allowed(gate)) await sleep(10);
    const numbers = Array.from({ length: Math.min(BULK, last - start) }, (_, i) => start + i);
    write('try', numbers);
    const outcomes = await Promise.all(numbers.map((n) => outcomeOf(
      queue.add('work', { n, mark: `chaos-job:${n}:` }, safe({ removeOnComplete: true })))));
    for (const kind of ['ok', 'unknown']) {
      const chosen = numbers.filter((_, i) => outcomes[i] === kind);
      if (chosen.length) write(kind, chosen);
    }
    if (outcomes.includes('unknown')) await sleep(PAUSE_MS);
  }
  process.exit(0);
}

function work() {
  const handle = async (job) => {
    write('start', [job.data.n]);
    await sleep(takesMs(job.data.n));
    write('end', [job.data.n]);
  };
  const worker = new Worker(told.queue, handle, {
    connection: { ...connection, ...safe({ maxRetriesPerRequest: null }) },
    concurrency: 100,
    ...safe({
      lockDuration: told.lease_ms,
      stalledInterval: told.lease_ms,
      maxStalledCount: 1000,
    }),
  });
  worker.on('error', () => {});
  process.on('SIGTERM', async () => {
    await worker.close();
    process.exit(0);
  });
}

process.stdin.resume();
process.stdin.on('end', () => process.exit(3)); // the conductor is gone
if (told.role === 'worker') work();
else produce();
