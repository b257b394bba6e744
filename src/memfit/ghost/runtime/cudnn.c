/* cuDNN: descriptors, and plans that need no workspace.
 *
 * How much workspace cuDNN asks for depends on engines that are chosen inside it, per shape and
 * card; it is not known here. The ghost answers 0 and records that it did (ghost_assumed), so that
 * a result can say so. PyTorch allocates that workspace through its own allocator, hence a network
 * of convolutions is reported too low by it, and by it alone.
 *
 * Recurrent networks and CTC loss also ask cuDNN for the size of tensors that stay (weights,
 * reserve space). A guess there would be wrong for good: those calls are gaps (gaps.txt).
 */
#include "ghost.h"

#include <stdlib.h>
#include <string.h>

API size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
API size_t cudnnGetCudartVersion(void) { return CUDA_VERSION; }

/* Source: library_types.h, libraryPropertyType: 0 major, 1 minor, 2 patch level. */
API status cudnnGetProperty(int type, int *value)
{
    const int parts[] = {CUDNN_VERSION / 10000, CUDNN_VERSION / 100 % 100, CUDNN_VERSION % 100};
    if (type < 0 || type > 2)
        return 2000; /* CUDNN_STATUS_BAD_PARAM */
    *value = parts[type];
    return SUCCESS;
}

API const char *cudnnGetErrorString(int error)
{
    return error == SUCCESS ? "CUDNN_STATUS_SUCCESS" : "not supported by memfit's ghost";
}

API void cudnnGetLastErrorString(char *message, size_t capacity)
{
    if (capacity)
        message[0] = '\0';
}

/* ---- Handles and descriptors ----------------------------------------------------------------- */

struct dnn_handle {
    void *stream;
};

API status cudnnCreate(void **handle) { return ghost_new_handle(handle, sizeof(struct dnn_handle)); }

API status cudnnDestroy(void *handle)
{
    free(handle);
    return SUCCESS;
}

API status cudnnSetStream(struct dnn_handle *handle, void *stream)
{
    handle->stream = stream;
    return SUCCESS;
}

API status cudnnGetStream(struct dnn_handle *handle, void **stream)
{
    *stream = handle->stream;
    return SUCCESS;
}

#define MOST_DIMENSIONS 8 /* cudnn_graph.h, CUDNN_DIM_MAX */

/* Tensors and filters are read back by PyTorch; the other descriptors only ever go in. */
struct descriptor {
    int data_type, format, dimensions;
    int sizes[MOST_DIMENSIONS], strides[MOST_DIMENSIONS];
};

#define DESCRIPTOR(Kind)                                                                                     \
    API status cudnnCreate##Kind##Descriptor(void **descriptor)                                              \
    {                                                                                                        \
        return ghost_new_handle(descriptor, sizeof(struct descriptor));                                      \
    }                                                                                                        \
    API status cudnnDestroy##Kind##Descriptor(void *descriptor)                                              \
    {                                                                                                        \
        free(descriptor);                                                                                    \
        return SUCCESS;                                                                                      \
    }

DESCRIPTOR(Tensor)
DESCRIPTOR(Filter)
DESCRIPTOR(Convolution)
DESCRIPTOR(Activation)
DESCRIPTOR(Pooling)
DESCRIPTOR(Dropout)
DESCRIPTOR(RNN)
DESCRIPTOR(RNNData)
DESCRIPTOR(CTCLoss)
DESCRIPTOR(SpatialTransformer)

static int within(int dimensions) { return dimensions < MOST_DIMENSIONS ? dimensions : MOST_DIMENSIONS; }

static void copy_sizes(int *to, const int *from, int count)
{
    memcpy(to, from, (size_t)(count > 0 ? count : 0) * sizeof *to);
}

API status cudnnSetTensorNdDescriptor(struct descriptor *tensor, int data_type, int dimensions,
                                      const int *sizes, const int *strides)
{
    *tensor = (struct descriptor){.data_type = data_type, .dimensions = within(dimensions)};
    copy_sizes(tensor->sizes, sizes, tensor->dimensions);
    copy_sizes(tensor->strides, strides, tensor->dimensions);
    return SUCCESS;
}

API status cudnnGetTensorNdDescriptor(const struct descriptor *tensor, int wanted, int *data_type,
                                      int *dimensions, int *sizes, int *strides)
{
    int count = wanted < tensor->dimensions ? wanted : tensor->dimensions;
    *data_type = tensor->data_type;
    *dimensions = tensor->dimensions;
    copy_sizes(sizes, tensor->sizes, count);
    copy_sizes(strides, tensor->strides, count);
    return SUCCESS;
}

API status cudnnSetFilterNdDescriptor(struct descriptor *filter, int data_type, int format, int dimensions,
                                      const int *sizes)
{
    *filter = (struct descriptor){.data_type = data_type, .format = format, .dimensions = within(dimensions)};
    copy_sizes(filter->sizes, sizes, filter->dimensions);
    return SUCCESS;
}

API status cudnnGetFilterNdDescriptor(const struct descriptor *filter, int wanted, int *data_type,
                                      int *format, int *dimensions, int *sizes)
{
    *data_type = filter->data_type;
    *format = filter->format;
    *dimensions = filter->dimensions;
    copy_sizes(sizes, filter->sizes, wanted < filter->dimensions ? wanted : filter->dimensions);
    return SUCCESS;
}

/* ---- The graph API: how PyTorch runs convolutions and attention ------------------------------ */

/* Source: cudnn_graph.h 9.24; the numbers have not moved since cuDNN 9.0. */
enum attribute_type { TYPE_INT64 = 3, TYPE_BACKEND_DESCRIPTOR = 15, TYPE_INT32 = 23 };
enum attribute_name {
    ENGINE_CONFIG_KNOB_CHOICES = 302,
    ENGINE_CONFIG_WORKSPACE_SIZE = 303,
    EXECUTION_PLAN_WORKSPACE_SIZE = 402,
};

struct backend_descriptor {
    int type;
};

API status cudnnBackendCreateDescriptor(int type, void **descriptor)
{
    status result = ghost_new_handle(descriptor, sizeof(struct backend_descriptor));
    if (result == SUCCESS)
        ((struct backend_descriptor *)*descriptor)->type = type;
    return result;
}

API status cudnnBackendDestroyDescriptor(void *descriptor)
{
    free(descriptor);
    return SUCCESS;
}

API status cudnnBackendSetAttribute(void *descriptor, int name, int type, int64_t count, const void *values)
{
    return SUCCESS;
}

API status cudnnBackendFinalize(void *descriptor) { return SUCCESS; }

/* Every question has one answer: one engine configuration, no knobs, no notes, numbers that are 0.
 * Where descriptors are asked for, the caller made them and they stay as they are. */
API status cudnnBackendGetAttribute(struct backend_descriptor *descriptor, int name, int type, int64_t wanted,
                                    int64_t *found, void *values)
{
    int64_t count = 0;
    if (name == ENGINE_CONFIG_WORKSPACE_SIZE || name == EXECUTION_PLAN_WORKSPACE_SIZE)
        ghost_assumed("cuDNN workspace size, as 0 bytes");
    if (name == ENGINE_CONFIG_KNOB_CHOICES) {
        count = 0;
    } else if (type == TYPE_BACKEND_DESCRIPTOR) {
        count = 1;
    } else if (type == TYPE_INT64 || type == TYPE_INT32) {
        count = 1;
        if (values && wanted > 0)
            memset(values, 0, type == TYPE_INT64 ? sizeof(int64_t) : sizeof(int32_t));
    }
    if (found)
        *found = count;
    return SUCCESS;
}

API status cudnnBackendExecute(void *handle, void *plan, void *variant_pack)
{
    COUNT(cudnn_calls);
    return (status)ghost_stub_called();
}

/* ---- The older convolution API (TORCH_CUDNN_V8_API_DISABLED=1) ------------------------------- */

/* Source: cudnn_cnn.h 9.24, cudnnConvolutionFwdAlgoPerf_t and its two siblings. */
struct algorithm_performance {
    int algorithm, result;
    float time;
    size_t memory;
    int determinism, math_type, reserved[3];
};
_Static_assert(sizeof(struct algorithm_performance) == 48, "cudnnConvolutionFwdAlgoPerf_t");

static status one_algorithm(int wanted, int *found, struct algorithm_performance *results)
{
    ghost_assumed("cuDNN workspace size, as 0 bytes");
    *found = wanted > 0;
    if (wanted > 0)
        results[0] = (struct algorithm_performance){.algorithm = 1, .determinism = 1};
    return SUCCESS;
}

static status no_workspace(size_t *size)
{
    ghost_assumed("cuDNN workspace size, as 0 bytes");
    *size = 0;
    return SUCCESS;
}

#define CONVOLUTION(Direction)                                                                               \
    API status cudnnGetConvolution##Direction##Algorithm_v7(                                                 \
        void *handle, void *a, void *b, void *convolution, void *c, int wanted, int *found,                  \
        struct algorithm_performance *results)                                                               \
    {                                                                                                        \
        return one_algorithm(wanted, found, results);                                                        \
    }                                                                                                        \
    API status cudnnFindConvolution##Direction##AlgorithmEx(                                                 \
        void *handle, void *a, const void *a_data, void *b, const void *b_data, void *convolution, void *c,  \
        void *c_data, int wanted, int *found, struct algorithm_performance *results, void *workspace,        \
        size_t size)                                                                                         \
    {                                                                                                        \
        forget_everything();                                                                                 \
        return one_algorithm(wanted, found, results);                                                        \
    }                                                                                                        \
    API status cudnnGetConvolution##Direction##WorkspaceSize(                                                \
        void *handle, void *a, void *b, void *convolution, void *c, int algorithm, size_t *size)             \
    {                                                                                                        \
        return no_workspace(size);                                                                           \
    }

CONVOLUTION(Forward)
CONVOLUTION(BackwardData)
CONVOLUTION(BackwardFilter)

/* ---- Batch normalization --------------------------------------------------------------------- */

API status cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *handle, int mode, int operations,
                                                                    void *x, void *z, void *y, void *scale,
                                                                    void *activation, size_t *size)
{
    return no_workspace(size);
}

API status cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *handle, int mode, int operations, void *x,
                                                             void *y, void *dy, void *dz, void *dx,
                                                             void *scale, void *activation, size_t *size)
{
    return no_workspace(size);
}

API status cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *handle, int mode, int operations,
                                                                void *activation, void *x, size_t *size)
{
    return no_workspace(size);
}
