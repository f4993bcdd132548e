// The two address translations around a hot-cache lookup whose rows live in pages: `to_keys` before, `to_rows` after.
//
// One block per row of the call. Compiled at run time with THREADS (a multiple of 32, at most 1024) and SPLIT (1: also
// write the two lists that attention needs when it attends the hits while the misses are in flight).

// Launched while the kernel before may still run (driver.py): nothing is read before that one's writes can be seen.
__device__ __forceinline__ void after_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

struct Params {
  const int* positions;        // [T, K] wanted positions, -1 padding
  const int* requests;         // [T] row of the block tables
  const int* valid_rows;       // [1] rows at and behind it are padding; null: all are valid
  const int* states;           // [B] cache state of a request, -1 none
  const int* source_table;     // [B, .] host page of each page of a request
  const int* hot_table;        // [B, .] device page of each page of a request's hot buffer
  const int* resident_table;   // [S, .] by state: device page of each page of a request; null: nothing is resident
  int* keys;                   // [T, K] host rows that are looked up
  int* state_rows;             // [T]
  int* rows;                   // [T, K] device rows of the wanted positions
  const int* slots;            // [T, K] what the lookup found
  const int* miss_slots;       // [T, K]
  const int* miss_counts;      // [T]
  int* miss_rows;              // [T, K] where the copy goes, in rows of `page_rows` a page
  int* valid_counts;           // [T] or null
  unsigned long long* stats;   // [2] hits and misses are added; or null
  int* hit_rows;               // [T, K] `rows` without the misses (SPLIT)
  int* late_rows;              // [T, K] the misses' part of `rows`, compact (SPLIT)
  long long positions_stride, source_stride, hot_stride, resident_stride;
  int wanted, page_rows, page_stride, resident_rows, resident_null, hot_slots;
};

__device__ __forceinline__ int request_of(const Params& p, int row) {
  return p.valid_rows && row >= *p.valid_rows ? -1 : p.requests[row];
}

extern "C" __global__ void __launch_bounds__(THREADS) to_keys(const Params p) {
  after_previous_kernel();
  const int row = blockIdx.x;
  const int request = request_of(p, row);
  const int state = request < 0 ? -1 : p.states[request];
  if (threadIdx.x == 0) p.state_rows[row] = state;
  const int* positions = p.positions + row * p.positions_stride;
  const long long begin = (long long)row * p.wanted;
  for (int k = threadIdx.x; k < p.wanted; k += THREADS) {
    int position = state < 0 ? -1 : positions[k];
    int key = -1, found = -1;
    if (position >= 0) {
      int page = p.resident_null;
      if (p.resident_table) page = p.resident_table[state * p.resident_stride + position / p.resident_rows];
      if (page != p.resident_null)
        found = page * p.page_stride + position % p.resident_rows;
      else
        key = p.source_table[request * p.source_stride + position / p.page_rows] * p.page_rows + position % p.page_rows;
    }
    p.keys[begin + k] = key;
    p.rows[begin + k] = found;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) to_rows(const Params p) {
  after_previous_kernel();
#if SPLIT
  extern __shared__ unsigned missed[];  // one bit a slot
#endif
  const int row = blockIdx.x;
  const int request = max(request_of(p, row), 0);
  const int* table = p.hot_table + request * p.hot_stride;
  const long long begin = (long long)row * p.wanted;
  const int misses = p.miss_counts[row];
#if SPLIT
  for (int word = threadIdx.x; word < (p.hot_slots + 31) / 32; word += THREADS) missed[word] = 0;
  __syncthreads();
#endif
  for (int k = threadIdx.x; k < p.wanted; k += THREADS) {
    int slot = k < misses ? p.miss_slots[begin + k] : -1;
    int page = slot < 0 ? 0 : table[slot / p.page_rows];
    p.miss_rows[begin + k] = slot < 0 ? -1 : page * p.page_rows + slot % p.page_rows;
#if SPLIT
    p.late_rows[begin + k] = slot < 0 ? -1 : page * p.page_stride + slot % p.page_rows;
    if (slot >= 0) atomicOr(&missed[slot >> 5], 1u << (slot & 31));
#endif
  }
#if SPLIT
  __syncthreads();
#endif
  int valid = 0, looked_up = 0;
  for (int k0 = 0; k0 < p.wanted; k0 += THREADS) {
    int k = k0 + threadIdx.x;
    int slot = k < p.wanted ? p.slots[begin + k] : -1;
    int found = k < p.wanted ? p.rows[begin + k] : -1;
    if (slot >= 0) found = table[slot / p.page_rows] * p.page_stride + slot % p.page_rows;
    if (k < p.wanted) {
      if (slot >= 0) p.rows[begin + k] = found;
#if SPLIT
      bool late = slot >= 0 && ((missed[slot >> 5] >> (slot & 31)) & 1);
      p.hit_rows[begin + k] = late ? -1 : found;
#endif
    }
    valid += __syncthreads_count(found >= 0);
    looked_up += __syncthreads_count(slot >= 0);
  }
  if (threadIdx.x == 0) {
    if (p.valid_counts) p.valid_counts[row] = valid;
    if (p.stats && looked_up > 0) {
      atomicAdd(p.stats, (unsigned long long)(looked_up - misses));
      atomicAdd(p.stats + 1, (unsigned long long)misses);
    }
  }
}
