// out[rows, columns] = x[rows, inner] @ weight[columns, inner]^T in bf16, for compute capability 9.0.
//
// One warp brings tiles of both operands by TMA, and one or two warpgroups of 64 rows multiply them.
// Each number is one chain of wgmma over the whole inner dimension, from the first input to the last,
// and x is always the first operand. So its bits depend on its row and its weights alone: the size of
// a tile, its place, and what shares it do not matter.
//
// `cuda_source.py` adds `Mma` for each width, and a kernel for each variant. Nothing is included, so
// that NVRTC needs no headers.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap {
    u64 opaque[16];
};

// The panels of a step have 64 inputs: rows of 128 bytes, as wide as the swizzle.
constexpr int PANEL_INPUTS = 64;
constexpr int PANEL_BYTES = 128;
constexpr int GROUP_ROWS = 64;

// What the programs of a cluster share: nothing, the rows of x, or the weight.
constexpr int SHARES_X = 1;
constexpr int SHARES_WEIGHT = 2;

template <int N> struct Mma;

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ void init_barrier(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void expect_bytes(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void wait_for(u32 barrier, u32 phase) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@!p bra W;\n"
        "}" ::"r"(barrier), "r"(phase) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// No write of this program has to become visible, only its reads have to be over, and
// `.release.cluster` would cost a MEMBAR.ALL.GPU in each step.
__device__ __forceinline__ void arrive_at(u32 barrier, u32 rank) {
    asm volatile(
        "{\n"
        ".reg .b32 r;\n"
        "mapa.shared::cluster.u32 r, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [r];\n"
        "}" ::"r"(barrier), "r"(rank) : "memory");
}

__device__ __forceinline__ void load(u32 target, const TensorMap* map, int input, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4}], [%2];" ::"r"(target), "l"((u64)map), "r"(barrier), "r"(input), "r"(row)
        : "memory");
}

__device__ __forceinline__ void load_for_all(u32 target, const TensorMap* map, int input, int row,
                                             u32 barrier, u16 mask) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(target), "l"((u64)map), "r"(barrier),
        "r"(input), "r"(row), "h"(mask)
        : "memory");
}

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void sync_cluster() {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Rows of 128 bytes along the inner dimension, swizzled by 128 bytes: eight rows take 1,024 bytes.
__device__ __forceinline__ u64 descriptor(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | (u64)64 << 32 | (u64)1 << 62;
}

// Bands of tiles along the rows share a tile of the weight while it is in the L2 cache.
__device__ __forceinline__ void tile_of(int unit, int tiles_m, int tiles_n, int band, int& m, int& n) {
    int number = unit / (band * tiles_n);
    int height = min(tiles_m - number * band, band);
    int rest = unit - number * band * tiles_n;
    m = number * band + rest % height;
    n = rest / height;
}

// Four lanes have numbers of the same row. Afterwards lane q has eight neighbours of group q.
__device__ __forceinline__ void exchange(u32 (&words)[4], int lane) {
    bool high = lane & 2;
    bool odd = lane & 1;
    u32 s = high ? words[0] : words[2];
    u32 t = high ? words[1] : words[3];
    s = __shfl_xor_sync(~0u, s, 2);
    t = __shfl_xor_sync(~0u, t, 2);
    if (high) {
        words[0] = s;
        words[1] = t;
    } else {
        words[2] = s;
        words[3] = t;
    }
    s = odd ? words[0] : words[1];
    t = odd ? words[2] : words[3];
    s = __shfl_xor_sync(~0u, s, 1);
    t = __shfl_xor_sync(~0u, t, 1);
    if (odd) {
        words[0] = s;
        words[2] = t;
    } else {
        words[1] = s;
        words[3] = t;
    }
}

// Adding to +0 turns a sum of -0 into +0, as in kernels whose chains begin with zeros.
__device__ __forceinline__ u32 rounded(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.0f + high), "f"(0.0f + low));
    return pair;
}

// GROUPS warpgroups of 64 rows; tiles of COLUMNS; ROWS of x are in shared memory, of which a group
// of fewer than 64 reads on into other data, whose results are not stored.
template <int GROUPS, int COLUMNS, int ROWS, int PANELS, int STAGES, int SHARES, int CLUSTER>
__device__ __forceinline__ void product(const TensorMap& x_map, const TensorMap& weight_map, u16* out,
                                        int rows, int columns, int steps, int tiles_m, int tiles_n,
                                        int band) {
    extern __shared__ u8 raw[];
    constexpr int X_BYTES = ROWS * PANELS * PANEL_BYTES;
    constexpr int WEIGHT_BYTES = COLUMNS * PANELS * PANEL_BYTES;
    constexpr int READ_ON_BYTES = GROUPS == 1 ? (GROUP_ROWS - ROWS) * PANEL_BYTES : 0;
    constexpr int TILE_ROWS = GROUP_ROWS * GROUPS;
    // Shared memory begins at the same address in each program of a cluster.
    u32 base = (shared_address(raw) + 1023) & ~1023u;
    u32 xs = base;
    u32 weights = base + STAGES * X_BYTES;
    u32 full = base + STAGES * (X_BYTES + WEIGHT_BYTES) + READ_ON_BYTES;
    u32 empty = full + 8 * STAGES;
    int warp = threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            init_barrier(full + 8 * i, 1);
            init_barrier(empty + 8 * i, GROUPS * 4 * CLUSTER);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (CLUSTER > 1)
        sync_cluster();
    else
        __syncthreads();
    int cluster = blockIdx.x / CLUSTER;
    int clusters = gridDim.x / CLUSTER;
    // A unit is as many neighbouring tiles as a cluster has programs.
    int units_m = SHARES == SHARES_WEIGHT ? (tiles_m + CLUSTER - 1) / CLUSTER : tiles_m;
    int units_n = SHARES == SHARES_X ? (tiles_n + CLUSTER - 1) / CLUSTER : tiles_n;
    if (warp >= GROUPS * 4) {
        if (GROUPS == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp == GROUPS * 4 && lane == 0) {
            int stage = 0;
            u32 phase = 0;
            for (int unit = cluster; unit < units_m * units_n; unit += clusters) {
                int m, n;
                tile_of(unit, units_m, units_n, band, m, n);
                if (SHARES == SHARES_X) n = n * CLUSTER + rank;
                if (SHARES == SHARES_WEIGHT) m = m * CLUSTER + rank;
                for (int k = 0; k < steps; k++) {
                    wait_for(empty + 8 * stage, phase ^ 1);
                    u32 barrier = full + 8 * stage;
                    expect_bytes(barrier, X_BYTES + WEIGHT_BYTES);
#pragma unroll
                    for (int panel = 0; panel < PANELS; panel++) {
                        int input = (k * PANELS + panel) * PANEL_INPUTS;
                        u32 x = xs + stage * X_BYTES + panel * ROWS * PANEL_BYTES;
                        u32 weight = weights + stage * WEIGHT_BYTES + panel * COLUMNS * PANEL_BYTES;
                        if (SHARES == SHARES_WEIGHT) {
                            constexpr int PART = COLUMNS / CLUSTER;
                            load_for_all(weight + rank * PART * PANEL_BYTES, &weight_map, input,
                                         n * COLUMNS + rank * PART, barrier, (1 << CLUSTER) - 1);
                        } else {
                            load(weight, &weight_map, input, n * COLUMNS, barrier);
                        }
                        if (SHARES == SHARES_X) {
                            constexpr int PART = ROWS / CLUSTER;
                            load_for_all(x + rank * PART * PANEL_BYTES, &x_map, input,
                                         m * TILE_ROWS + rank * PART, barrier, (1 << CLUSTER) - 1);
                        } else {
                            load(x, &x_map, input, m * TILE_ROWS, barrier);
                        }
                    }
                    if (++stage == STAGES) {
                        stage = 0;
                        phase ^= 1;
                    }
                }
            }
        }
    } else {
        if (GROUPS == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        int group = warp / 4;
        int stage = 0;
        int before = 0;
        u32 phase = 0;
        auto release = [&](int released) {
            // Each warp for itself: the wait of one says nothing of the other three.
            if (CLUSTER > 1) {
                if (lane < CLUSTER) arrive_at(empty + 8 * released, lane);
            } else if (lane == 0) {
                arrive(empty + 8 * released);
            }
        };
        for (int unit = cluster; unit < units_m * units_n; unit += clusters) {
            int m, n;
            tile_of(unit, units_m, units_n, band, m, n);
            if (SHARES == SHARES_X) n = n * CLUSTER + rank;
            if (SHARES == SHARES_WEIGHT) m = m * CLUSTER + rank;
            float sums[COLUMNS / 2];
            for (int k = 0; k < steps; k++) {
                wait_for(full + 8 * stage, phase);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int panel = 0; panel < PANELS; panel++) {
                    u64 a = descriptor(xs + stage * X_BYTES + panel * ROWS * PANEL_BYTES +
                                       group * GROUP_ROWS * PANEL_BYTES);
                    u64 b = descriptor(weights + stage * WEIGHT_BYTES + panel * COLUMNS * PANEL_BYTES);
#pragma unroll
                    for (int turn = 0; turn < 4; turn++)
                        Mma<COLUMNS>::add(sums, a + 2 * turn, b + 2 * turn, (k | panel | turn) != 0);
                }
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (k > 0) release(before);
                before = stage;
                if (++stage == STAGES) {
                    stage = 0;
                    phase ^= 1;
                }
            }
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");
            release(before);
            int first_row = m * TILE_ROWS + warp * 16 + lane / 4;
            int q = lane % 4;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int row = first_row + 8 * half;
                bool is_live = row < rows;
                u16* target = out + (long long)row * columns;
#pragma unroll
                for (int j = 0; j + 4 <= COLUMNS / 8; j += 4) {
                    u32 words[4];
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        words[i] = rounded(sums[(j + i) * 4 + 2 * half], sums[(j + i) * 4 + 2 * half + 1]);
                    exchange(words, lane);
                    int column = n * COLUMNS + (j + q) * 8;
                    if (is_live && column < columns)
                        *(uint4*)(target + column) = make_uint4(words[0], words[1], words[2], words[3]);
                }
#pragma unroll
                for (int j = COLUMNS / 32 * 4; j < COLUMNS / 8; j++) {
                    int column = n * COLUMNS + j * 8 + q * 2;
                    if (is_live && column < columns)
                        *(u32*)(target + column) = rounded(sums[j * 4 + 2 * half], sums[j * 4 + 2 * half + 1]);
                }
            }
        }
    }
    // A neighbour may still arrive at a barrier of this program.
    __syncwarp();
    if (CLUSTER > 1) sync_cluster();
}
