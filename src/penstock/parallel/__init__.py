"""The axes beside the pipeline: data, context, experts and tensors, on one mesh."""
