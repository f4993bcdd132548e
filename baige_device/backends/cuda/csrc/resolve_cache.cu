// Hot cache lookup: one block per cache state.
//
// Compiled at run time with these macros:
//   KEY          int or `long long`: type of keys and slot_keys
//   SLOT         short or int: type of lru_slots; also what the working tables hold
//   STATE        int or `long long`: type of state_rows
//   THREADS      threads of a block, a multiple of 32, at most 1024
//   IN_SHARED    1: the working set lies in shared memory; 0: in the workspace, one piece per row of the call
//   STREAMS      1: what a step reads and writes once leaves the L2 cache first
//
// One row with its own state, the case of plain decoding, takes the short way (`resolve_one`): the wanted keys are put
// in a hash table and the LRU list is walked once. Several rows of one state (speculative verification), or more keys
// than registers hold, take the long way (`resolve_many`): the cached keys are put in the table, every row is looked
// up in it, and the missing keys are put in it too, so that a key that two rows miss is loaded once.
// Misses are listed in the order in which the row names them (short way) or in rising key order (long way), so that a
// row without repeated keys gets the same plan in every run, whatever order the threads come in.

#define BUCKETS THREADS
#define BATCH 4

// Launched while the kernel before may still run (driver.py): nothing is read before that one's writes can be seen.
__device__ __forceinline__ void after_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// As ordinary lines, a large batch's tables and plans push out of the L2 cache the page tables that the copy behind reads
// host memory by (docs/cuda.md, "Large pools").
template <typename T>
__device__ __forceinline__ T load_once(const T* address) {
#if STREAMS
  return __ldcs(address);
#else
  return *address;
#endif
}

template <typename T>
__device__ __forceinline__ void store_once(T* address, T value) {
#if STREAMS
  __stcs(address, value);
#else
  *address = value;
#endif
}

struct Params {
  const KEY* keys;
  const STATE* state_rows;
  KEY* slot_keys;
  SLOT* lru_slots;
  int* slots;
  KEY* miss_keys;
  int* miss_slots;
  int* miss_counts;
  char* workspace;
  long long workspace_stride;                                          // bytes
  long long keys_stride, slot_keys_stride, lru_stride;                 // elements
  long long slots_stride, miss_keys_stride, miss_slots_stride;         // elements
  int rows, wanted, cached;                                            // T, K, H
  int table, table_one;                                                // places of the hash tables, powers of two
};

__device__ __forceinline__ unsigned hash(KEY key) {
  unsigned long long mixed = (unsigned long long)key * 0x9E3779B97F4A7C15ull;
  return (unsigned)(mixed >> 32);
}

__device__ __forceinline__ KEY swap_if_empty(KEY* place, KEY key) {
  if (sizeof(KEY) == 8)
    return (KEY)atomicCAS((unsigned long long*)place, (unsigned long long)(long long)-1, (unsigned long long)key);
  return (KEY)atomicCAS((int*)place, -1, (int)key);
}

// The place of `key`, entering it when it is absent; `fresh` says that this call entered it.
__device__ __forceinline__ int enter(KEY* table, unsigned mask, KEY key, bool& fresh) {
  unsigned at = hash(key) & mask;
  for (;;) {
    KEY held = *(volatile KEY*)(table + at);
    if (held == -1) held = swap_if_empty(table + at, key);
    if (held == -1 || held == key) {
      fresh = held == -1;
      return (int)at;
    }
    at = (at + 1) & mask;
  }
}

// The place of `key`, or -1.
__device__ __forceinline__ int find(const KEY* table, unsigned mask, KEY key) {
  unsigned at = hash(key) & mask;
  for (;;) {
    KEY held = *(volatile const KEY*)(table + at);
    if (held == key) return (int)at;
    if (held == -1) return -1;
    at = (at + 1) & mask;
  }
}

// Exclusive prefix sum of one value a thread.
__device__ __forceinline__ int scan(int value) {
  __shared__ int warp_sums[32];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, sum = value;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int before = lane < warp ? warp_sums[lane] : 0;
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) before += __shfl_xor_sync(~0u, before, step);
  return sum - value + before;
}

// Sort few table places by their keys: four lanes count the smaller keys of one place.
#define FEW (2 * THREADS / 4)

__device__ __forceinline__ void sort_few(const KEY* table, int* list, int count) {
  __shared__ KEY keys[FEW];
  int place[2], rank[2];
  for (int i = threadIdx.x; i < count; i += THREADS) keys[i] = table[list[i]];
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 2; j++) {
    int i = j * (THREADS / 4) + (threadIdx.x >> 2);
    if (j * (THREADS / 4) >= count) continue;
    place[j] = i < count ? list[i] : 0;
    KEY key = i < count ? keys[i] : 0;
    int smaller = 0;
#pragma unroll 8
    for (int other = threadIdx.x & 3; other < count; other += 4) smaller += keys[other] < key;
    smaller += __shfl_xor_sync(~0u, smaller, 1);
    smaller += __shfl_xor_sync(~0u, smaller, 2);
    rank[j] = smaller;
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 2; j++)
    if (j * (THREADS / 4) + (threadIdx.x >> 2) < count && (threadIdx.x & 3) == 0) list[rank[j]] = place[j];
}

// Sort the `count` table places in `list` by their keys: buckets of equal width, then exact ranks inside a bucket.
__device__ __forceinline__ void sort_by_key(const KEY* table, int* list, int* scratch, int count) {
  __shared__ int begins[BUCKETS + 1];
  __shared__ int cursors[BUCKETS];
  __shared__ long long lowest, highest;
  if (threadIdx.x == 0) {
    lowest = 0x7fffffffffffffffll;
    highest = 0;
  }
  cursors[threadIdx.x] = 0;
  __syncthreads();
  long long low = 0x7fffffffffffffffll, high = 0;
  for (int i = threadIdx.x; i < count; i += THREADS) {
    long long key = table[list[i]];
    low = min(low, key);
    high = max(high, key);
  }
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) {
    low = min(low, __shfl_xor_sync(~0u, low, step));
    high = max(high, __shfl_xor_sync(~0u, high, step));
  }
  if ((threadIdx.x & 31) == 0 && threadIdx.x < ((count + 31) & ~31)) {
    atomicMin(&lowest, low);
    atomicMax(&highest, high);
  }
  __syncthreads();
  low = lowest;
  int shift = 64 - __clzll((unsigned long long)(highest - low));
  shift = max(0, shift - (31 - __clz(BUCKETS)));
  for (int i = threadIdx.x; i < count; i += THREADS) atomicAdd(&cursors[(int)((table[list[i]] - low) >> shift)], 1);
  __syncthreads();
  int begin = scan(cursors[threadIdx.x]);
  begins[threadIdx.x] = begin;
  cursors[threadIdx.x] = begin;
  if (threadIdx.x == 0) begins[BUCKETS] = count;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += THREADS) {
    int place = list[i];
    scratch[atomicAdd(&cursors[(int)((table[place] - low) >> shift)], 1)] = place;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += THREADS) {
    int place = scratch[i];
    KEY key = table[place];
    int bucket = (int)((key - low) >> shift), end = begins[bucket + 1], rank = begins[bucket];
    for (int j = rank; j < end; j++) rank += table[scratch[j]] < key;
    list[rank] = place;
  }
  __syncthreads();
}

// The next row after `row` with the same state, or `rows`.
__device__ __forceinline__ int next_row(const Params& p, STATE state, int row) {
  __shared__ int nearest;
  __syncthreads();
  if (threadIdx.x == 0) nearest = p.rows;
  __syncthreads();
  for (int t = row + 1 + threadIdx.x; t < p.rows; t += THREADS)
    if (p.state_rows[t] == state) {
      atomicMin(&nearest, t);
      break;
    }
  __syncthreads();
  return nearest;
}

__device__ __forceinline__ void write_padded_row(const Params& p, int row) {
  for (int k = threadIdx.x; k < p.wanted; k += THREADS) {
    p.slots[row * p.slots_stride + k] = -1;
    p.miss_keys[row * p.miss_keys_stride + k] = -1;
    p.miss_slots[row * p.miss_slots_stride + k] = -1;
  }
  if (threadIdx.x == 0) p.miss_counts[row] = 0;
}

// What becomes of one wanted key: its slot, -2 - place for a miss, or -1.
__device__ __forceinline__ int look_up(KEY key, KEY* table, SLOT* value, unsigned mask, unsigned char* used, int* list,
                                       int* misses, int cached) {
  if (key < 0) return -1;
  int place = find(table, mask, key);
  if (place < 0) {
    // Beyond `cached` distinct misses there is no room for certain, and the table must not fill up.
    if (*(volatile int*)misses >= cached) return -1;
    bool fresh;
    place = enter(table, mask, key, fresh);
    if (fresh) {
      int position = atomicAdd(misses, 1);
      if (position < cached) list[position] = place;
    }
  }
  // Only cached keys have a value yet.
  SLOT slot = value[place];
  if (slot < 0) return -2 - place;
  used[slot] = 1;
  return slot;
}

__device__ __forceinline__ void fill(char* begin, int bytes) {
  uint4 ones = make_uint4(~0u, ~0u, ~0u, ~0u);
  for (int i = threadIdx.x; i < bytes / 16; i += THREADS) ((uint4*)begin)[i] = ones;
}

struct Work {
  KEY* table;
  SLOT* value;  // of a table place: the slot of its key, -1 while it has none
  int* list;    // table places of the misses
  int* scratch;
  unsigned* unused;  // one bit per LRU position
  int* before;       // unused positions before each word of `unused`
  SLOT* order;       // the LRU list as it was
  SLOT* victims;
  unsigned char* used;  // per slot
};

__device__ __forceinline__ Work lay_out(char* base, const Params& p) {
  const int words = (p.cached + 31) >> 5;
  Work w;
  w.table = (KEY*)base;
  w.value = (SLOT*)(w.table + p.table);
  w.list = (int*)(w.value + p.table);
  w.scratch = w.list + p.cached;
  w.unused = (unsigned*)(w.scratch + p.wanted);
  w.before = (int*)(w.unused + words);
  w.order = (SLOT*)(w.before + words);
  w.victims = w.order + p.cached;
  w.used = (unsigned char*)(w.victims + p.cached);
  return w;
}

// By one warp: how many bits are set before each of `words` words, and in all of them.
__device__ __forceinline__ int count_before(const unsigned* bits, int* before, int words) {
  int lane = threadIdx.x & 31, each = (words + 31) / 32, sum = 0;
  for (int w = lane * each; w < min(words, (lane + 1) * each); w++) sum += __popc(bits[w]);
  int inclusive = sum;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    int other = __shfl_up_sync(~0u, inclusive, step);
    if (lane >= step) inclusive += other;
  }
  int rank = inclusive - sum;
  for (int w = lane * each; w < min(words, (lane + 1) * each); w++) {
    before[w] = rank;
    rank += __popc(bits[w]);
  }
  return __shfl_sync(~0u, inclusive, 31);
}

// Where the LRU position `i` goes when the first `loaded` unused slots are taken for misses.
__device__ __forceinline__ int new_position(bool unused, int rank, int i, int loaded, int free_slots, int cached) {
  if (!unused) return free_slots - loaded + i - rank;
  return rank < loaded ? cached - loaded + rank : rank - loaded;
}

// One row that has its state for itself; all its keys and slots are in registers.
__device__ __forceinline__ void resolve_one(const Params& p, const Work& w, int row, unsigned mask, KEY* slot_keys,
                                            SLOT* lru, const KEY (&key_batch)[BATCH], const KEY (&held_batch)[BATCH],
                                            const SLOT (&order_batch)[BATCH]) {
  __shared__ unsigned missing[BATCH * THREADS / 32];
  __shared__ int before_missing[BATCH * THREADS / 32];
  __shared__ int free_slots;
  const int tid = threadIdx.x, lane = tid & 31, cached = p.cached;
  KEY* held = w.table + p.table / 2;  // the table's second half is not needed here
  int place[BATCH];
  KEY met[BATCH];
  unsigned fresh_bits = 0;
  // The first probes of a thread's keys are under way together; few keys need a second one.
#pragma unroll
  for (int j = 0; j < BATCH; j++) {
    int s = tid + j * THREADS;
    if (s < cached) held[s] = held_batch[j];
    place[j] = key_batch[j] >= 0 ? (int)(hash(key_batch[j]) & mask) : -1;
    met[j] = place[j] >= 0 ? swap_if_empty(w.table + place[j], key_batch[j]) : (KEY)0;
  }
#pragma unroll
  for (int j = 0; j < BATCH; j++) {
    if (place[j] < 0) continue;
    while (met[j] != -1 && met[j] != key_batch[j]) {
      place[j] = (place[j] + 1) & mask;
      met[j] = swap_if_empty(w.table + place[j], key_batch[j]);
    }
    fresh_bits |= (unsigned)(met[j] == -1) << j;
  }
  __syncthreads();
  unsigned unused_bits = 0;
  KEY key[BATCH];
  int at[BATCH];
#pragma unroll
  for (int j = 0; j < BATCH; j++) {
    key[j] = tid + j * THREADS < cached ? held[order_batch[j]] : (KEY)-1;
    at[j] = (int)(hash(key[j]) & mask);
    met[j] = w.table[at[j]];
  }
#pragma unroll
  for (int j = 0; j < BATCH; j++) {
    int i = tid + j * THREADS;
    while (key[j] >= 0 && met[j] != -1 && met[j] != key[j]) {
      at[j] = (at[j] + 1) & mask;
      met[j] = w.table[at[j]];
    }
    bool free = i < cached && (key[j] < 0 || met[j] == -1);
    if (i < cached && !free) w.value[at[j]] = order_batch[j];
    unsigned ballot = __ballot_sync(~0u, free);
    if (lane == 0 && i < cached) w.unused[i >> 5] = ballot;
    unused_bits |= (unsigned)free << j;
  }
  __syncthreads();
  unsigned miss_bits = 0;
#pragma unroll
  for (int j = 0; j < BATCH; j++) {
    bool miss = ((fresh_bits >> j) & 1) && w.value[place[j]] < 0;
    unsigned ballot = __ballot_sync(~0u, miss);
    if (lane == 0) missing[(tid + j * THREADS) >> 5] = ballot;
    miss_bits |= (unsigned)miss << j;
  }
  if (tid < 32) {
    int total = count_before(w.unused, w.before, (cached + 31) >> 5);
    if (lane == 0) free_slots = total;
  }
  __syncthreads();
  __shared__ int misses;
  if (tid < 32) {
    int total = count_before(missing, before_missing, BATCH * THREADS / 32);
    if (lane == 0) misses = total;
  }
  __syncthreads();
  const int free_count = free_slots, loaded = min(misses, free_count);
  const unsigned below = (1u << lane) - 1;
#pragma unroll
  for (int j = 0; j < BATCH; j++) {
    int i = tid + j * THREADS;
    if ((miss_bits >> j) & 1) w.list[before_missing[i >> 5] + __popc(missing[i >> 5] & below)] = place[j];
    if (i >= cached) continue;
    int rank = w.before[i >> 5] + __popc(w.unused[i >> 5] & below);
    bool unused = (unused_bits >> j) & 1;
    if (unused && rank < loaded) w.victims[rank] = order_batch[j];
    store_once(lru + new_position(unused, rank, i, loaded, free_count, cached), order_batch[j]);
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < BATCH; j++) {
    int i = tid + j * THREADS;
    KEY loading = -1;
    int slot = -1;
    if (i < loaded) {
      slot = w.victims[i];
      loading = w.table[w.list[i]];
      w.value[w.list[i]] = (SLOT)slot;
      store_once(slot_keys + slot, loading);
    }
    if (i < p.wanted) {
      store_once(p.miss_keys + row * p.miss_keys_stride + i, loading);
      store_once(p.miss_slots + row * p.miss_slots_stride + i, slot);
    }
  }
  if (tid == 0) p.miss_counts[row] = loaded;
  __syncthreads();
#pragma unroll
  for (int j = 0; j < BATCH; j++) {
    int k = tid + j * THREADS;
    if (k < p.wanted) store_once(p.slots + row * p.slots_stride + k, place[j] >= 0 ? (int)w.value[place[j]] : -1);
  }
}

// All rows of a state that several rows share, or a row too long for registers.
__device__ __forceinline__ void resolve_many(const Params& p, const Work& w, STATE state, int me, int second,
                                          KEY* slot_keys, SLOT* lru) {
  __shared__ int misses, free_slots;
  const int tid = threadIdx.x, lane = tid & 31;
  const int cached = p.cached, words = (cached + 31) >> 5;
  const unsigned mask = p.table - 1;
  KEY* table = w.table;
  SLOT *value = w.value, *order = w.order, *victims = w.victims;
  int *list = w.list, *scratch = w.scratch, *before = w.before;
  unsigned* unused = w.unused;
  unsigned char* used = w.used;
  fill((char*)table, p.table * (int)(sizeof(KEY) + sizeof(SLOT)));
  for (int s = tid; s < cached; s += THREADS) used[s] = 0;
  if (tid == 0) misses = 0;
  __syncthreads();
  for (int s = tid; s < cached; s += THREADS) {
    bool fresh;
    KEY key = slot_keys[s];
    order[s] = lru[s];
    if (key >= 0) value[enter(table, mask, key, fresh)] = (SLOT)s;
  }
  __syncthreads();

  // Look up every row in turn. `slots` holds hits as they are and misses as -2 - place until the end.
  int begin = 0;
  for (int row = me; row < p.rows; row = row == me ? second : next_row(p, state, row)) {
    const KEY* keys = p.keys + row * p.keys_stride;
    int* slots = p.slots + row * p.slots_stride;
    for (int k = tid; k < p.wanted; k += THREADS)
      slots[k] = look_up(keys[k], table, value, mask, used, list, &misses, cached);
    __syncthreads();
    int count = min(misses, cached) - begin;
    if (count <= FEW) sort_few(table, list + begin, count);
    else sort_by_key(table, list + begin, scratch, count);
    if (tid == 0) p.miss_counts[row] = count;
    begin += count;
  }

  // One pass over the LRU list: which slots are unused, and their ranks.
  for (int i0 = 0; i0 < words * 32; i0 += THREADS) {
    int i = i0 + tid;
    bool free = i < cached && !used[order[i]];
    unsigned ballot = __ballot_sync(~0u, free);
    if (lane == 0 && (i >> 5) < words) unused[i >> 5] = ballot;
  }
  __syncthreads();
  if (tid < 32) {
    int total = count_before(unused, before, words);
    if (lane == 0) free_slots = total;
  }
  __syncthreads();
  const int free_count = free_slots, loaded = min(begin, free_count);
  for (int i = tid; i < cached; i += THREADS) {
    unsigned word = unused[i >> 5];
    int rank = before[i >> 5] + __popc(word & ((1u << lane) - 1));
    SLOT slot = order[i];
    bool free = (word >> lane) & 1;
    if (free && rank < loaded) victims[rank] = slot;
    lru[new_position(free, rank, i, loaded, free_count, cached)] = slot;
  }
  __syncthreads();
  for (int i = tid; i < loaded; i += THREADS) {
    SLOT slot = victims[i];
    value[list[i]] = slot;
    slot_keys[slot] = table[list[i]];
  }
  __syncthreads();

  begin = 0;
  for (int row = me; row < p.rows; row = row == me ? second : next_row(p, state, row)) {
    int* slots = p.slots + row * p.slots_stride;
    for (int k = tid; k < p.wanted; k += THREADS) {
      int found = slots[k];
      if (found <= -2) slots[k] = value[-2 - found];
    }
    int listed = p.miss_counts[row];
    int count = max(0, min(listed, loaded - begin));
    for (int i = tid; i < p.wanted; i += THREADS) {
      p.miss_keys[row * p.miss_keys_stride + i] = i < count ? table[list[begin + i]] : (KEY)-1;
      p.miss_slots[row * p.miss_slots_stride + i] = i < count ? (int)victims[begin + i] : -1;
    }
    __syncthreads();
    if (tid == 0) p.miss_counts[row] = count;
    begin += listed;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) resolve_cache(const Params p) {
  after_previous_kernel();
  extern __shared__ __align__(16) char shared[];
  __shared__ int nearest;
  const int me = blockIdx.x, tid = threadIdx.x;
  const STATE state = p.state_rows[me];
  if (state < 0) {
    write_padded_row(p, me);
    return;
  }
  const Work w = lay_out(IN_SHARED ? shared : p.workspace + me * p.workspace_stride, p);
  KEY* slot_keys = p.slot_keys + state * p.slot_keys_stride;
  SLOT* lru = p.lru_slots + state * p.lru_stride;

  // All loads that the first steps need are under way before anything waits.
  KEY held_batch[BATCH], key_batch[BATCH];
  SLOT order_batch[BATCH];
#pragma unroll
  for (int j = 0; j < BATCH; j++) {
    int s = tid + j * THREADS;
    held_batch[j] = s < p.cached ? load_once(slot_keys + s) : (KEY)-1;
    order_batch[j] = s < p.cached ? load_once(lru + s) : (SLOT)0;
    key_batch[j] = s < p.wanted ? load_once(p.keys + me * p.keys_stride + s) : (KEY)-1;
  }
  fill((char*)w.table, p.table_one * (int)sizeof(KEY));
  fill((char*)w.value, p.table_one * (int)sizeof(SLOT));
  if (tid == 0) nearest = p.rows;
  // The first row of a state works for all its rows.
  bool earlier = false;
  int later = p.rows;
  for (int t = tid; t < p.rows; t += THREADS)
    if (t != me && p.state_rows[t] == state) {
      earlier |= t < me;
      if (t > me) later = min(later, t);
    }
  if (__syncthreads_or(earlier)) return;
  if (__syncthreads_or(later < p.rows) || max(p.wanted, p.cached) > BATCH * THREADS) {
    if (later < p.rows) atomicMin(&nearest, later);
    __syncthreads();
    resolve_many(p, w, state, me, nearest, slot_keys, lru);
    return;
  }
  resolve_one(p, w, me, p.table_one - 1, slot_keys, lru, key_batch, held_batch, order_batch);
}
