// Row copies between a host pool and a device pool over the host link.
//
// Compiled at run time with these macros:
//   UNIT          16, 8, 4, 2 or 1: bytes of one access; divides every base address and stride of both pools
//   LOADS         accesses a lane has in flight for one row
//   ROWS          rows a warp has in flight
//   THREADS       threads of a block, a multiple of 32
//   SRC_INDEX, DST_INDEX, OFFSET_INDEX   int or `long long`: type of the row ids and of dst_offsets
//   SCATTER       0: src is the host pool, id -1 zeroes its destination. 1: dst is the host pool, id -1 skips.
//
// Entries are visited in plan order by all warps together: at any moment the rows in flight are neighbours in the
// plan, hence (one request's rows) in few pages of host memory. The link is bound by address translation otherwise.

#if UNIT == 16
typedef uint4 Vec;
#elif UNIT == 8
typedef uint2 Vec;
#elif UNIT == 4
typedef unsigned int Vec;
#elif UNIT == 2
typedef unsigned short Vec;
#else
typedef unsigned char Vec;
#endif

// Lane 0 starts at a line of the host side, so that no line is requested twice by two accesses of a warp.
#define LINE (32 * UNIT < 128 ? 32 * UNIT : 128)

struct Pool {
  char* base;
  long long page_stride;  // bytes
  long long row_stride;   // bytes
  long long page_rows;    // 0: the pool is not paged
};

// Launched while the kernel before may still run (driver.py): nothing is read before that one's writes can be seen.
__device__ __forceinline__ void after_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

struct Params {
  Pool src, dst;
  const SRC_INDEX* src_rows;
  const DST_INDEX* dst_rows;
  const OFFSET_INDEX* dst_offsets;                       // [requests], or null
  long long src_outer, src_inner, dst_outer, dst_inner;  // strides of the plan, in elements
  const int* count;                                      // [requests], or null
  long long requests, entries;                           // the plan's shape
  long long row_bytes;
};

struct Row {
  const char* src;  // null: write zeros
  char* dst;        // null: skip
};

__device__ __forceinline__ Vec load(const char* address) {
#if UNIT == 16
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
  return v;
#elif UNIT == 8
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(address));
  return v;
#else
  return __ldg((const Vec*)address);
#endif
}

// Rows written here pass through the L2 cache as the first to be evicted: as ordinary lines they push out what the
// translation of host addresses needs, and a copy out of a large pool takes 1.4 times as long.
__device__ __forceinline__ void store(char* address, Vec v) {
#if UNIT == 16 && __CUDA_ARCH__ >= 800
  unsigned long long policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1,%2,%3,%4}, %5;"
               :: "l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "l"(policy) : "memory");
#else
  __stcs((Vec*)address, v);
#endif
}

__device__ __forceinline__ Vec zero() {
#if UNIT == 16
  return make_uint4(0, 0, 0, 0);
#elif UNIT == 8
  return make_uint2(0, 0);
#else
  return 0;
#endif
}

__device__ __forceinline__ char* address(const Pool& pool, long long row) {
  if (pool.page_rows == 0) return pool.base + row * pool.row_stride;
  long long page = (row >> 31) ? row / pool.page_rows : (long long)((unsigned)row / (unsigned)pool.page_rows);
  return pool.base + page * pool.page_stride + (row - page * pool.page_rows) * pool.row_stride;
}

__device__ __forceinline__ Row locate(const Params& p, long long request, long long entry) {
  Row row = {nullptr, nullptr};
  long long d = p.dst_rows[request * p.dst_outer + entry * p.dst_inner];
  long long s = p.src_rows[request * p.src_outer + entry * p.src_inner];
  if (d < 0 || (SCATTER && s < 0)) return row;
  if (p.dst_offsets != nullptr) d += p.dst_offsets[request];
  row.dst = address(p.dst, d);
  if (s >= 0) row.src = address(p.src, s);
  return row;
}

// The plan's entries of one segment of requests, as one flat list: offsets[i] is where request i begins in it.
__device__ __forceinline__ void scan_counts(const Params& p, long long first, int requests, long long* offsets) {
  __shared__ long long warp_totals[32];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  long long mine = 0;
  if (threadIdx.x < requests) {
    mine = p.count[first + threadIdx.x];
    mine = mine < 0 ? 0 : (mine > p.entries ? p.entries : mine);
  }
  long long sum = mine;
  for (int step = 1; step < 32; step <<= 1) {
    long long other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) warp_totals[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    long long total = lane < blockDim.x / 32 ? warp_totals[lane] : 0;
    for (int step = 1; step < 32; step <<= 1) {
      long long other = __shfl_up_sync(~0u, total, step);
      if (lane >= step) total += other;
    }
    warp_totals[lane] = total;
  }
  __syncthreads();
  if (warp > 0) sum += warp_totals[warp - 1];
  if (threadIdx.x < requests) offsets[threadIdx.x + 1] = sum;
  if (threadIdx.x == 0) offsets[0] = 0;
  __syncthreads();
}

__device__ __forceinline__ int find_request(const long long* offsets, int low, int requests, long long entry) {
  int high = requests - 1;
  while (low < high) {
    int middle = (low + high + 1) >> 1;
    if (offsets[middle] <= entry) low = middle; else high = middle - 1;
  }
  return low;
}

__device__ __forceinline__ void move(const Params& p, const Row (&rows)[ROWS], int lane, Row (&next)[ROWS],
                                     bool more, int& request, const long long* offsets, long long first,
                                     int requests, long long entry, long long total) {
  const int vectors = (int)(p.row_bytes / UNIT);
  int lead[ROWS];
  int longest = 0;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const char* host = SCATTER ? rows[r].dst : rows[r].src;
    lead[r] = (int)(((unsigned long long)host & (LINE - 1)) / UNIT);
    longest = max(longest, vectors + lead[r]);
  }
  bool prefetched = false;
  for (int begin = 0; begin < longest || !prefetched; begin += 32 * LOADS) {
    Vec held[ROWS][LOADS];
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int u = 0; u < LOADS; u++) {
        int k = begin + 32 * u + lane - lead[r];
        bool inside = k >= 0 && k < vectors && rows[r].dst != nullptr;
        held[r][u] = zero();
        if (inside && rows[r].src != nullptr) held[r][u] = load(rows[r].src + (long long)k * UNIT);
      }
    // The next rows are looked up while this one's data is under way.
    if (!prefetched) {
      prefetched = true;
      if (more) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          next[r].dst = nullptr;
          next[r].src = nullptr;
          long long e = entry + r;
          if (e < total) {
            if (offsets != nullptr) {
              request = find_request(offsets, request, requests, e);
              next[r] = locate(p, first + request, e - offsets[request]);
            } else {
              next[r] = locate(p, e / p.entries, e % p.entries);
            }
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int u = 0; u < LOADS; u++) {
        int k = begin + 32 * u + lane - lead[r];
        if (k >= 0 && k < vectors && rows[r].dst != nullptr) store(rows[r].dst + (long long)k * UNIT, held[r][u]);
      }
  }
  int tail = (int)(p.row_bytes - (long long)vectors * UNIT);
  if (tail > 0) {
#pragma unroll
    for (int r = 0; r < ROWS; r++)
      if (lane < tail && rows[r].dst != nullptr) {
        long long at = (long long)vectors * UNIT + lane;
        rows[r].dst[at] = rows[r].src != nullptr ? rows[r].src[at] : 0;
      }
  }
}

__device__ __forceinline__ void copy_list(const Params& p, long long first, int requests, const long long* offsets,
                                          long long total) {
  const int lane = threadIdx.x & 31;
  const int warps = blockDim.x >> 5;
  const long long step = (long long)gridDim.x * warps * ROWS;
  long long entry = ((long long)blockIdx.x * warps + (threadIdx.x >> 5)) * ROWS;
  if (entry >= total) return;
  Row rows[ROWS], next[ROWS];
  int request = 0;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    rows[r].src = nullptr;
    rows[r].dst = nullptr;
    long long e = entry + r;
    if (e < total) {
      if (offsets != nullptr) {
        request = find_request(offsets, request, requests, e);
        rows[r] = locate(p, first + request, e - offsets[request]);
      } else {
        rows[r] = locate(p, e / p.entries, e % p.entries);
      }
    }
  }
  while (entry < total) {
    entry += step;
    move(p, rows, lane, next, entry < total, request, offsets, first, requests, entry, total);
#pragma unroll
    for (int r = 0; r < ROWS; r++) rows[r] = next[r];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) copy_rows(const Params p) {
  after_previous_kernel();
  __shared__ long long offsets[THREADS + 1];
  if (p.count == nullptr) {
    copy_list(p, 0, 0, nullptr, p.requests * p.entries);
    return;
  }
  for (long long first = 0; first < p.requests; first += blockDim.x) {
    long long left = p.requests - first;
    int requests = (int)(left < blockDim.x ? left : blockDim.x);
    scan_counts(p, first, requests, offsets);
    copy_list(p, first, requests, offsets, offsets[requests]);
    __syncthreads();
  }
}
