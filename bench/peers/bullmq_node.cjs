// BullMQ on Node: the scenarios of harness.py and tasks.py, for the one library that is not Python.
// Completed jobs are removed, as its documentation advises; its events stream cannot be turned off.
'use strict';
const { Queue, Worker } = require('bullmq');
const Redis = require('ioredis');
const fs = require('fs');

const asked = JSON.parse(process.argv[2]);
const { hostname, port } = new URL(asked.url);
const connection = { host: hostname, port: Number(port), maxRetriesPerRequest: null };
const PAYLOAD = { to: 'user@example.com', n: 123 };
const SLOTS = 100;
const SETTLE_MS = 300;
const DONE = { removeOnComplete: true };
const SOON = { attempts: 3, backoff: { type: 'fixed', delay: 1 } };
const OPTIONS = asked.retries ? { ...DONE, ...SOON } : DONE;

const monotonicS = () => Number(process.hrtime.bigint()) / 1e9; // the clock of Python's monotonic()
const wallS = () => (performance.timeOrigin + performance.now()) / 1e3;
const sleep = (ms) => new Promise((wake) => setTimeout(wake, ms));
const cpuS = () => {
  const used = process.cpuUsage();
  return (used.user + used.system) / 1e6;
};
const rssMb = () => process.memoryUsage().rss / 2 ** 20;
const jobsOf = (from, count) =>
  Array.from({ length: count }, (_, i) => ({ to: 'user@example.com', n: from + i }));

function tell(result) {
  const version = (name) => {
    const found = require.resolve.paths(name).map((folder) => `${folder}/${name}/package.json`);
    return JSON.parse(fs.readFileSync(found.find(fs.existsSync), 'utf8')).version;
  };
  const packages = { 'bullmq (npm)': version('bullmq'), 'ioredis (npm)': version('ioredis') };
  console.log('RESULT ' + JSON.stringify({ ...result, packages }));
}

// ── What a run cost ─────────────────────────────────────────────────────────────────────────────

class Server {
  constructor() {
    this.client = new Redis(connection);
  }

  async info(section) {
    const text = await this.client.info(section);
    return Object.fromEntries(
      text.split('\r\n').filter((line) => line.includes(':')).map((line) => {
        const at = line.indexOf(':');
        return [line.slice(0, at), line.slice(at + 1)];
      }));
  }

  async cpuS() {
    const told = await this.info('cpu');
    return Number(told.used_cpu_user) + Number(told.used_cpu_sys);
  }

  async calls() {
    const counts = {};
    for (const [name, value] of Object.entries(await this.info('commandstats'))) {
      counts[name.replace('cmdstat_', '')] = Number(value.match(/calls=(\d+)/)[1]);
    }
    delete counts.info;
    return counts;
  }
}

async function meter() {
  const server = new Server();
  const serverS = await server.cpuS();
  const usedS = cpuS();
  const startS = monotonicS();
  return async (n, seconds) => {
    const passedS = seconds ?? monotonicS() - startS;
    const spentS = cpuS() - usedS;
    const result = {
      n,
      seconds: passedS,
      rate: n / passedS,
      client_cpu_per_100k: (spentS / n) * 1e5,
      server_cpu_per_100k: (((await server.cpuS()) - serverS) / n) * 1e5,
      rss_mb: rssMb(),
      peak_mb: process.resourceUsage().maxRSS / 1024,
    };
    server.client.disconnect();
    return result;
  };
}

// ── Adding ──────────────────────────────────────────────────────────────────────────────────────

const bulkOf = (every, options) =>
  every.map((data) => ({ name: 'welcome', data, opts: options }));
const delayUntil = (dueS) => ({ ...DONE, delay: Math.max(1, Math.round((dueS - wallS()) * 1e3)) });

async function by100(every, add) {
  let next = 0;
  const one = async () => {
    while (next < every.length) await add(every[next++]);
  };
  await Promise.all(Array.from({ length: SLOTS }, one));
}

function mixedOf(size, number) {
  const ways = [{ attempts: 3 }, SOON, { delay: 3_600_000 }, {}];
  return Array.from({ length: size }, (_, i) => {
    const opts = { ...DONE, ...ways[i % 4] };
    if (i % 4 === 3) opts.jobId = `order-${number}-${i}`;
    return { name: 'welcome', data: PAYLOAD, opts };
  });
}

const adding = {
  async single(queue, { n }) {
    for (let i = 0; i < 20; i++) await queue.add('welcome', PAYLOAD, OPTIONS);
    const spent = await meter();
    for (let i = 0; i < n; i++) await queue.add('welcome', PAYLOAD, OPTIONS);
    return spent(n);
  },
  async gather(queue, { n }) {
    const add = (data) => queue.add('welcome', data, OPTIONS);
    await by100(Array(SLOTS).fill(PAYLOAD), add);
    const spent = await meter();
    await by100(Array(n).fill(PAYLOAD), add);
    return spent(n);
  },
  async bulk(queue, { n, size }) {
    const every = Array(size).fill(PAYLOAD);
    await queue.addBulk(bulkOf(every, OPTIONS));
    const spent = await meter();
    for (let i = 0; i < n / size; i++) await queue.addBulk(bulkOf(every, OPTIONS));
    return spent(n);
  },
  async mixed(queue, { n, size }) {
    await queue.addBulk(mixedOf(4, 'first'));
    const spent = await meter();
    for (let i = 0; i < n / size; i++) await queue.addBulk(mixedOf(size, i));
    return spent(n);
  },
  async fill(queue, { n }) {
    for (let i = 0; i < n; i += 1000) {
      await queue.addBulk(bulkOf(jobsOf(i, Math.min(1000, n - i)), OPTIONS));
    }
    return { n };
  },
  async paced(queue, { n, per_s }) {
    const startS = monotonicS() + 0.05;
    for (let i = 0; i < n; i++) {
      const waitS = startS + i / per_s - monotonicS();
      if (waitS > 0) await sleep(waitS * 1e3);
      await queue.add('welcome', { ...PAYLOAD, t: monotonicS() }, OPTIONS);
    }
    return { n };
  },
  async schedule(queue, { n, lead_s }) {
    const dueS = wallS() + lead_s;
    const spent = await meter();
    for (let i = 0; i < n; i += 1000) {
      await queue.addBulk(bulkOf(jobsOf(i, Math.min(1000, n - i)), delayUntil(dueS)));
    }
    return { ...(await spent(n)), due_s: dueS, in_time: wallS() < dueS };
  },
  async spread(queue, { n, lead_s, over_s }) {
    const startS = wallS() + lead_s;
    const every = Array.from({ length: n }, (_, i) => (
      { ...PAYLOAD, due: startS + (i * over_s) / n }));
    await by100(every, (data) => queue.add('welcome', data, delayUntil(data.due)));
    return { n, in_time: wallS() < startS };
  },
};

// ── Working ─────────────────────────────────────────────────────────────────────────────────────

async function drain({ n, retries, memory }) {
  const runs = new Uint8Array(n);
  const failed = new Uint8Array(n);
  const rss = [];
  let count = 0, firstS = 0, lastS = 0;
  const startedS = monotonicS();
  const spent = await meter();
  const handle = (data, done) => {
    if (!firstS) firstS = monotonicS();
    if (retries && !failed[data.n]) {
      failed[data.n] = 1;
      throw new Error('fails the first time');
    }
    runs[data.n]++;
    count++;
    if (memory && count % Math.max(1, Math.floor(n / 20)) === 0) rss.push(rssMb());
    if (count === n) {
      lastS = monotonicS();
      done();
    }
  };
  return [handle, async () => {
    const ran = runs.reduce((sum, each) => sum + (each > 0), 0);
    const told = { ran, more_than_once: runs.reduce((sum, each) => sum + (each > 1), 0) };
    if (rss.length) told.rss_mb_over_time = rss;
    if (ran < n) return { ...told, error: `ran ${ran} of ${n} jobs` };
    const cost = await spent(n, lastS - firstS);
    return { ...cost, ...told, startup_s: firstS - startedS };
  }];
}

function delays({ n, field }) {
  const clock = field === 't' ? monotonicS : wallS;
  const samples = [];
  const handle = (data, done) => {
    samples.push(clock() - data[field]);
    if (samples.length === n) done();
  };
  return [handle, () => {
    if (samples.length < n) return { error: `ran ${samples.length} of ${n} jobs` };
    const kept = samples.slice(Math.floor(n * 0.05)).sort((a, b) => a - b);
    const at = Array.from({ length: 1001 }, (_, i) =>
      kept[Math.min(kept.length - 1, Math.floor((kept.length * i) / 1000))] * 1e3);
    return {
      n, p50_ms: at[500], p90_ms: at[900], p99_ms: at[990], max_ms: at[1000],
      early: kept.filter((sample) => sample < -0.001).length,
      quantiles_ms: at.filter((_, i) => i % 10 === 0),
    };
  }];
}

async function due({ n, due_s }) {
  let count = 0, early = 0, firstS = 0, lastS = 0;
  const spent = await meter();
  const handle = (data, done) => {
    const nowS = wallS();
    count++;
    if (nowS < due_s - 0.001) early++;
    if (count === 1) firstS = nowS;
    if (count === n) {
      lastS = nowS;
      done();
    }
  };
  return [handle, async () => {
    if (count < n) return { error: `ran ${count} of ${n} jobs` };
    const cost = await spent(n, lastS - due_s);
    return { ...cost, early, first_after_ms: (firstS - due_s) * 1e3 };
  }];
}

async function idle({ seconds }) {
  const handle = () => { throw new Error('the queue was to be empty'); };
  return [handle, async () => {
    await sleep(2000);
    const server = new Server();
    const [calls, usedS, serverS] = [await server.calls(), cpuS(), await server.cpuS()];
    const startS = monotonicS();
    await sleep(seconds * 1e3);
    const passedS = monotonicS() - startS;
    const spentS = cpuS() - usedS;
    const more = {};
    for (const [name, count] of Object.entries(await server.calls())) {
      if (count > (calls[name] ?? 0)) more[name] = count - (calls[name] ?? 0);
    }
    const total = Object.values(more).reduce((sum, count) => sum + count, 0);
    return {
      cpu_percent: (spentS / passedS) * 100,
      server_cpu_percent: (((await server.cpuS()) - serverS) / passedS) * 100,
      commands_per_s: total / passedS, commands: more, rss_mb: rssMb(),
    };
  }];
}

function count({ n }) {
  let seen = 0;
  const handle = (data, done) => {
    if (++seen >= n) done();
  };
  return [handle, () => ({ n, count: seen })];
}

const working = { drain, delays, due, idle, count };

async function main() {
  if (asked.scenario in adding) {
    const queue = new Queue('bench', { connection });
    await queue.waitUntilReady();
    tell(await adding[asked.scenario](queue, asked));
    await queue.close();
    return;
  }
  const [handle, result] = await working[asked.scenario](asked);
  let finish;
  const done = new Promise((resolve) => { finish = resolve; });
  const worker = new Worker('bench', async (job) => handle(job.data, finish),
    { connection, concurrency: SLOTS });
  await worker.waitUntilReady();
  console.log('READY');
  if (asked.scenario !== 'idle') {
    await Promise.race([done, sleep((asked.limit_s ?? 120) * 1e3)]);
    await sleep(SETTLE_MS);
  }
  tell(await result());
  process.exit(0);
}

main().catch((error) => {
  console.error(String(error));
  process.exit(1);
});
