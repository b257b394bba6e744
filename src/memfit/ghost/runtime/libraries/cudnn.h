/* What the files of cuDNN share: descriptors, and questions about sizes.
 *
 *   cudnn_descriptors.c                 handles; tensors, filters and the descriptors that are only passed in
 *   cudnn_graph.c           the graph API: how PyTorch runs convolutions and attention
 *   cudnn_convolution.c     the older convolution API (TORCH_CUDNN_V8_API_DISABLED=1)
 *   cudnn_normalization.c   batch normalization
 *   cudnn_recurrent.c       RNN, LSTM, GRU, and the dropout between their layers
 *   cudnn_ctc.c             the CTC loss
 *
 * The size of a cuDNN workspace depends on the engine that cuDNN chooses per shape and card. The runtime
 * cannot know it: each file describes the operation in full and asks (ghost_ask). The answer comes from
 * memfit.ghost.workspaces.
 */
#ifndef MEMFIT_CUDNN_H
#define MEMFIT_CUDNN_H

#include "array.h"
#include "core/ghost.h"

#define DNN_BAD_PARAM 2000 /* cudnn_graph.h, CUDNN_STATUS_BAD_PARAM */
#define MOST_DIMENSIONS 8  /* cudnn_graph.h, CUDNN_DIM_MAX */

/* A tensor, or a filter. Sizes and strides in elements, outermost first. */
struct tensor {
    int data_type; /* cudnn_graph.h, cudnnDataType_t */
    int dimensions;
    int64_t sizes[MOST_DIMENSIONS], strides[MOST_DIMENSIONS];
};

enum convolution_operation { CONVOLUTION_FORWARD, CONVOLUTION_DATA_GRADIENT, CONVOLUTION_WEIGHT_GRADIENT };

/* One convolution in full. In the backward, x, w and y stand for the gradient of the same shape. The number
 * of groups is the channels of x over those of w. */
struct convolution {
    enum convolution_operation operation;
    int compute_type;
    struct tensor x, w, y;
    int spatial; /* dimensions of padding, stride and dilation */
    int64_t padding[MOST_DIMENSIONS], stride[MOST_DIMENSIONS], dilation[MOST_DIMENSIONS];
    int fused; /* further operations in the same graph: bias, activation */
};

#define DESCRIPTOR(Kind, type) HANDLE(cudnnCreate##Kind##Descriptor, cudnnDestroy##Kind##Descriptor, type)

/* Text that grows as it is written. `cut`: part of it is missing. */
struct text {
    ARRAY(char); /* count: without the final 0 */
    bool cut;
};

__attribute__((format(printf, 2, 3))) void append(struct text *text, const char *format, ...);
void free_text(struct text *text);

/* A question is a JSON object, written piece by piece. A cut question is asked as one of an unknown kind.
 * Asking frees the question. */
struct text begin_question(const char *kind);
void add_number(struct text *question, const char *name, int64_t value);
void add_text(struct text *question, const char *name, const char *value);
void add_tensor(struct text *question, const char *name, const struct tensor *tensor);
void add_list(struct text *question, const char *name, const int64_t *values, int count);
/* Return the bytes of the workspace. */
uint64_t ask_workspace(struct text *question);
/* Write the configurations in the order of preference; return how many were written. */
int ask_configurations(struct text *question, struct ghost_configuration *offers, int room);

uint64_t convolution_workspace(const struct convolution *convolution);

/* Return `count`, or as many as a descriptor has room for: nothing is read or written beyond. */
static inline int capped_dimensions(int64_t count)
{
    return count < 0 ? 0 : count < MOST_DIMENSIONS ? (int)count : MOST_DIMENSIONS;
}

#endif
