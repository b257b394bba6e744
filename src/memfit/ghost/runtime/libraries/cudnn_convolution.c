/* Convolutions: the question about a workspace, and the older API (TORCH_CUDNN_V8_API_DISABLED=1). */
#include "libraries/cudnn.h"

uint64_t convolution_workspace(const struct convolution *convolution)
{
    static const char *const operations[] = {"forward", "data gradient", "weight gradient"};
    struct text question = begin_question("convolution");
    add_text(&question, "operation", operations[convolution->operation]);
    add_number(&question, "compute_type", convolution->compute_type);
    add_tensor(&question, "x", &convolution->x);
    add_tensor(&question, "w", &convolution->w);
    add_tensor(&question, "y", &convolution->y);
    add_list(&question, "padding", convolution->padding, convolution->spatial);
    add_list(&question, "stride", convolution->stride, convolution->spatial);
    add_list(&question, "dilation", convolution->dilation, convolution->spatial);
    add_number(&question, "fused", convolution->fused);
    return ask_workspace(&question);
}

/* ---- The descriptor -------------------------------------------------------------------------- */

DESCRIPTOR(Convolution, struct convolution)

API status cudnnSetConvolutionNdDescriptor(struct convolution *convolution, int spatial, const int *padding,
                                           const int *stride, const int *dilation, int mode, int compute_type)
{
    *convolution = (struct convolution){.spatial = capped_dimensions(spatial), .compute_type = compute_type};
    for (int i = 0; i < convolution->spatial; i++) {
        convolution->padding[i] = padding[i];
        convolution->stride[i] = stride[i];
        convolution->dilation[i] = dilation[i];
    }
    return SUCCESS;
}

/* ---- Algorithms: always the same one --------------------------------------------------------- */

/* Source: cudnn_cnn.h 9.24, cudnnConvolutionFwdAlgoPerf_t and its two siblings. */
struct algorithm_performance {
    int algorithm, result;
    float time;
    size_t memory;
    int determinism, math_type, reserved[3];
};
_Static_assert(sizeof(struct algorithm_performance) == 48, "cudnnConvolutionFwdAlgoPerf_t");

static uint64_t workspace(enum convolution_operation operation, const struct convolution *convolution,
                          const struct tensor *x, const struct tensor *w, const struct tensor *y)
{
    struct convolution whole = *convolution;
    whole.operation = operation;
    whole.x = *x, whole.w = *w, whole.y = *y;
    return convolution_workspace(&whole);
}

static status one_algorithm(uint64_t memory, int wanted, int *found, struct algorithm_performance *results)
{
    *found = wanted > 0;
    if (wanted > 0)
        results[0] =
            (struct algorithm_performance){.algorithm = 1, .determinism = 1, .memory = (size_t)memory};
    return SUCCESS;
}

/* The three directions take their tensors in different orders: the macro maps a, b and c to x, w and y. */
#define CONVOLUTION(Direction, operation, x, w, y)                                                           \
    API status cudnnGetConvolution##Direction##Algorithm_v7(                                                 \
        void *handle, struct tensor *a, struct tensor *b, struct convolution *convolution, struct tensor *c, \
        int wanted, int *found, struct algorithm_performance *results)                                       \
    {                                                                                                        \
        return one_algorithm(workspace(operation, convolution, x, w, y), wanted, found, results);            \
    }                                                                                                        \
    API status cudnnFindConvolution##Direction##AlgorithmEx(                                                 \
        void *handle, struct tensor *a, const void *a_data, struct tensor *b, const void *b_data,            \
        struct convolution *convolution, struct tensor *c, void *c_data, int wanted, int *found,             \
        struct algorithm_performance *results, void *space, size_t size)                                     \
    {                                                                                                        \
        ghost_stub_called();                                                                                 \
        ghost_workspace_used(space, size);                                                                   \
        return one_algorithm(workspace(operation, convolution, x, w, y), wanted, found, results);            \
    }                                                                                                        \
    API status cudnnGetConvolution##Direction##WorkspaceSize(                                                \
        void *handle, struct tensor *a, struct tensor *b, struct convolution *convolution, struct tensor *c, \
        int algorithm, size_t *size)                                                                         \
    {                                                                                                        \
        *size = (size_t)workspace(operation, convolution, x, w, y);                                          \
        return SUCCESS;                                                                                      \
    }                                                                                                        \
    API status cudnnConvolution##Direction(void *handle, const void *alpha, const void *a,                   \
                                           const void *a_data, const void *b, const void *b_data,            \
                                           const void *convolution, int algorithm, void *space, size_t size, \
                                           const void *beta, const void *c, void *c_data)                    \
    {                                                                                                        \
        COUNT(cudnn_calls);                                                                                  \
        ghost_workspace_used(space, size);                                                                   \
        return (status)ghost_stub_called();                                                                  \
    }

CONVOLUTION(Forward, CONVOLUTION_FORWARD, a, b, c)
CONVOLUTION(BackwardData, CONVOLUTION_DATA_GRADIENT, c, a, b)
CONVOLUTION(BackwardFilter, CONVOLUTION_WEIGHT_GRADIENT, a, c, b)

API status cudnnConvolutionBiasActivationForward(void *handle, const void *alpha1, const void *x,
                                                 const void *x_data, const void *w, const void *w_data,
                                                 const void *convolution, int algorithm, void *space,
                                                 size_t size, const void *alpha2, const void *z,
                                                 const void *z_data, const void *bias, const void *bias_data,
                                                 const void *activation, const void *y, void *y_data)
{
    COUNT(cudnn_calls);
    ghost_workspace_used(space, size);
    return (status)ghost_stub_called();
}
