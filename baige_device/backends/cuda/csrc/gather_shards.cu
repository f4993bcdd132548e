// Shards of other GPUs, copied by multiprocessors over the peer links.
//
// Compiled at run time with these macros:
//   THREADS    threads of a block, a multiple of 32
//   UNROLL     16-byte accesses of a thread in flight
//
// A job is a copy from one address to another; either side may lie on a peer. Blocks [0, link_blocks) do the remote jobs,
// each its own stretch of every job; the blocks behind copy the local one. Between two barriers nobody's shard changes and
// nobody's image is read, so the kernel is a whole gather: block b of every rank meets block b of all others. Without
// remote blocks it is a local copy that meets nobody.

#define MAX_RANKS 16
#define MAX_BLOCKS 128

struct Job {
  const char* source;
  char* target;
  long long bytes;
};

// Lies in memory that all ranks have mapped; zeroed once.
struct Pad {
  unsigned arrived[MAX_BLOCKS][MAX_RANKS];  // by block and sending rank: how many barriers the sender has reached
  unsigned passed[MAX_BLOCKS];              // by block: how many barriers this rank has begun
};

struct Params {
  Job remote[MAX_RANKS];  // in the order in which they are copied
  Job local;
  Pad* pads[MAX_RANKS];
  int jobs, ranks, rank, link_blocks;
};

// Counts instead of flags: a barrier is one posted store to each peer, and nothing has to be set back.
__device__ __forceinline__ void meet(const Params& p) {
  __syncthreads();
  Pad* own = p.pads[p.rank];
  unsigned count = own->passed[blockIdx.x] + 1;
  __syncthreads();
  if (threadIdx.x == 0) own->passed[blockIdx.x] = count;
  if (threadIdx.x < p.ranks && threadIdx.x != p.rank) {
    unsigned* theirs = &p.pads[threadIdx.x]->arrived[blockIdx.x][p.rank];
    unsigned* mine = &own->arrived[blockIdx.x][threadIdx.x];
    asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(theirs), "r"(count) : "memory");
    unsigned seen;
    do {
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(mine) : "memory");
    } while ((int)(seen - count) < 0);
  }
  __syncthreads();
}

// Not the read-only path: a peer may still write its shard while this kernel waits.
__device__ __forceinline__ uint4 load(const uint4* address) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address) : "memory");
  return v;
}

__device__ __forceinline__ void store(uint4* address, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" :: "l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ void copy_bytes(const char* source, char* target, long long bytes) {
  for (long long i = threadIdx.x; i < bytes; i += THREADS) target[i] = *(const volatile char*)(source + i);
}

__device__ __forceinline__ void copy_vectors(const uint4* source, uint4* target, long long count) {
  for (long long begin = threadIdx.x; begin < count; begin += (long long)THREADS * UNROLL) {
    uint4 held[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (begin + u * THREADS < count) held[u] = load(source + begin + u * THREADS);
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (begin + u * THREADS < count) store(target + begin + u * THREADS, held[u]);
  }
}

// This block's stretch of a job: as many 16-byte units as the others', the ragged ends on the first block.
__device__ __forceinline__ void split(const Job& job, int block, int blocks) {
  if (((unsigned long long)job.source ^ (unsigned long long)job.target) & 15) {
    long long share = (job.bytes + blocks - 1) / blocks, begin = min(job.bytes, share * block);
    copy_bytes(job.source + begin, job.target + begin, min(share, job.bytes - begin));
    return;
  }
  long long head = min(job.bytes, (long long)(-(unsigned long long)job.source & 15));
  long long units = (job.bytes - head) / 16, share = (units + blocks - 1) / blocks;
  long long begin = min(units, share * block), count = min(share, units - begin);
  if (count > 0)
    copy_vectors((const uint4*)(job.source + head + 16 * begin), (uint4*)(job.target + head + 16 * begin), count);
  if (block == 0) {
    copy_bytes(job.source, job.target, head);
    long long done = head + 16 * units;
    copy_bytes(job.source + done, job.target + done, job.bytes - done);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gather_shards(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  if (blockIdx.x >= p.link_blocks) {
    split(p.local, blockIdx.x - p.link_blocks, gridDim.x - p.link_blocks);
    return;
  }
  meet(p);
  for (int i = 0; i < p.jobs; i++) split(p.remote[i], blockIdx.x, p.link_blocks);
  meet(p);
}
