/* The CTC loss. PyTorch uses cuDNN's if the blank is 0, targets are one row of int32, inputs are
 * float32 and no target is longer than 255 or than its input (aten/src/ATen/native/cudnn/LossCTC.cpp). */
#include "libraries/cudnn.h"

struct ctc {
    int data_type, longest; /* longest: length of the longest label, if the descriptor has it */
};

DESCRIPTOR(CTCLoss, struct ctc)

ENTRY(cudnnSetCTCLossDescriptorEx(struct ctc *ctc, int data_type, int normalization, int gradient),
      *ctc = (struct ctc){.data_type = data_type})
ENTRY(cudnnSetCTCLossDescriptor_v9(struct ctc *ctc, int data_type, int normalization, int gradient,
                                   int longest),
      *ctc = (struct ctc){data_type, longest})

static status ctc_workspace(const struct tensor *probabilities, int longest, int algorithm, size_t *size)
{
    struct text question = begin_question("ctc");
    add_tensor(&question, "probabilities", probabilities); /* steps, batch, alphabet */
    add_number(&question, "longest", longest);
    add_number(&question, "algorithm", algorithm);
    *size = (size_t)ask_workspace(&question);
    return SUCCESS;
}

API status cudnnGetCTCLossWorkspaceSize(void *handle, struct tensor *probabilities, struct tensor *gradients,
                                        const int *labels, const int *label_lengths, const int *input_lengths,
                                        int algorithm, struct ctc *ctc, size_t *size)
{
    int longest = 0;
    for (int64_t i = 0; i < probabilities->sizes[1]; i++)
        if (label_lengths[i] > longest)
            longest = label_lengths[i];
    return ctc_workspace(probabilities, longest, algorithm, size);
}

CALL(cudnnGetCTCLossWorkspaceSize_v8(void *handle, int algorithm, struct ctc *ctc,
                                     struct tensor *probabilities, struct tensor *gradients, size_t *size),
     ctc_workspace(probabilities, ctc->longest, algorithm, size))

API status cudnnCTCLoss(void *handle, void *probabilities_layout, const void *probabilities,
                        const int *labels, const int *label_lengths, const int *input_lengths, void *costs,
                        void *gradients_layout, void *gradients, int algorithm, void *ctc, void *workspace,
                        size_t workspace_size)
{
    ghost_workspace_used(workspace, workspace_size);
    return (status)ghost_stub_called();
}

API status cudnnCTCLoss_v8(void *handle, int algorithm, void *ctc, void *probabilities_layout,
                           const void *probabilities, const int *labels, const int *label_lengths,
                           const int *input_lengths, void *costs, void *gradients_layout, void *gradients,
                           size_t workspace_size, void *workspace)
{
    ghost_workspace_used(workspace, workspace_size);
    return (status)ghost_stub_called();
}
