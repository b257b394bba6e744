/* cuFFT: plans and the size of their work area. cuRAND is only linked to: PyTorch's
 * generators are its own kernels.
 */
#include "core/ghost.h"

/* Plans are small integers without state. */
API status cufftCreate(int *plan)
{
    static int last;
    *plan = __atomic_add_fetch(&last, 1, __ATOMIC_RELAXED);
    return SUCCESS;
}

/* The longest transform that one kernel does: 512 was measured not to need a work area, 59,049 to need one. */
#define ONE_KERNEL 512
/* cuFFT's documentation (13.0, "Accuracy and Performance"): Cooley-Tukey for factors up to 127, and Bluestein's
 * algorithm for lengths with larger ones. */
#define LARGEST_FACTOR 127
/* More values than a GPU holds: such a plan fails where its data are allocated. */
#define MOST_VALUES ((size_t)1 << 40)

/* The largest prime factor up to LARGEST_FACTOR; if n has larger ones, their product. */
static size_t largest_factor(size_t n)
{
    size_t found = 1;
    for (size_t factor = 2; factor <= LARGEST_FACTOR; factor++)
        for (; n > 1 && n % factor == 0; n /= factor)
            found = factor;
    return n > 1 ? n : found;
}

/* The shortest length for Bluestein's convolution of n values: at least 2 n - 1, of the factors 2, 3 and 5. */
static size_t bluestein_length(size_t n)
{
    size_t least = 2 * n - 1, found = SIZE_MAX;
    for (size_t fives = 1; fives < 5 * least; fives *= 5)
        for (size_t length = fives; length < 3 * least; length *= 3) {
            size_t whole = length;
            while (whole < least)
                whole *= 2;
            found = whole < found ? whole : found;
        }
    return found;
}

/* The work area in elements of the complex type. Source: 49 transforms of one to three dimensions, measured on
 * an H100 with CUDA 13.0 (benchmarks/gpu/results, decision 65). Transforms of one kernel in each dimension need
 * none: short ones of the factors 2 to 7, and complex ones of prime length. Others, and all from complex to
 * real numbers, write their data there once. Bluestein's algorithm needs its convolution besides. NVIDIA
 * documents a worst case of eight copies of the data. */
static size_t work_elements(int rank, const long long *sizes, size_t batch, bool real, bool to_real)
{
    size_t full = batch, convolved = 0, last = 1;
    bool one_kernel_each = true;
    for (int i = 0; i < rank; i++) {
        last = sizes[i] > 0 ? (size_t)sizes[i] : 1;
        size_t factor = largest_factor(last);
        bool plain = factor <= 7 || (factor == last && !real);
        full *= last;
        one_kernel_each &= last <= ONE_KERNEL && plain;
        if (last > ONE_KERNEL && factor > LARGEST_FACTOR && last <= MOST_VALUES)
            convolved = bluestein_length(last);
    }
    if (one_kernel_each && !to_real)
        return 0;
    bool halves = real && (to_real || last % 2 == 0 || convolved); /* the other half is the conjugate */
    return (halves ? full / last * (last / 2 + 1) : full) + batch * convolved;
}

API status cufftXtMakePlanMany(int plan, int rank, long long *sizes, long long *in_embed, long long in_step,
                               long long in_distance, int in_type, long long *out_embed, long long out_step,
                               long long out_distance, int out_type, long long batch, size_t *work_size,
                               int execution_type)
{
    ghost_assumed("cuFFT work area, by a rule from one H100");
    bool real = in_type != out_type, to_real = real && in_type == execution_type;
    if (work_size)
        *work_size =
            work_elements(rank, sizes, (size_t)batch, real, to_real) * data_type_width(execution_type);
    return SUCCESS;
}
