/* What the files of cuDNN share: descriptors, and questions about sizes.
 *
 *   cudnn.c                 handles; tensors, filters and the descriptors that only go in
 *   cudnn_graph.c           the graph API: how PyTorch runs convolutions and attention
 *   cudnn_convolution.c     the older convolution API (TORCH_CUDNN_V8_API_DISABLED=1)
 *   cudnn_normalization.c   batch normalization
 *   cudnn_recurrent.c       RNN, LSTM, GRU, and the dropout between their layers
 *   cudnn_ctc.c             the CTC loss
 *
 * How much memory cuDNN wants to work in depends on the engine that it chooses per shape and card.
 * Nobody here can know that: each file says in full what is to be done, and asks (ghost_ask). The
 * answer comes from outside the runtime, from memfit.ghost.workspaces.
 */
#ifndef MEMFIT_CUDNN_H
#define MEMFIT_CUDNN_H

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

/* One convolution, said in full. In the backward, x, w and y stand for whichever gradient has
 * their shape. Groups show in the channels: those of x over those of w. */
struct convolution {
    enum convolution_operation operation;
    int compute_type;
    struct tensor x, w, y;
    int spatial; /* dimensions of padding, stride and dilation */
    int64_t padding[MOST_DIMENSIONS], stride[MOST_DIMENSIONS], dilation[MOST_DIMENSIONS];
    int fused; /* operations that follow in the same graph: bias, activation */
};

/* Text that grows as it is written. `cut`: something is missing from it. */
struct text {
    char *at;
    size_t length, capacity;
    bool cut;
};

__attribute__((format(printf, 2, 3))) void say(struct text *text, const char *format, ...);
void free_text(struct text *text);

/* A question is a JSON object, written piece by piece. A cut one is not asked, but answered like an unknown
 * one. Asking frees it. */
struct text question_about(const char *kind);
void say_number(struct text *question, const char *name, int64_t value);
void say_text(struct text *question, const char *name, const char *value);
void say_tensor(struct text *question, const char *name, const struct tensor *tensor);
void say_list(struct text *question, const char *name, const int64_t *values, int count);
/* How many bytes it takes. */
uint64_t asked(struct text *question);
/* The ways to do it, in the order of preference; returns how many were written. */
int offered(struct text *question, struct ghost_configuration *offers, int room);

uint64_t convolution_workspace(const struct convolution *convolution);

/* How many of `count` there is room for: nothing is read or written beyond. */
static inline int within(int64_t count)
{
    return count < 0 ? 0 : count < MOST_DIMENSIONS ? (int)count : MOST_DIMENSIONS;
}

#endif
