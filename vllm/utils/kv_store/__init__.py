"""Blocks of bytes that are kept on disk by content: `segment` has a file pair of one writer, `folder` all of them with
their bound, and `blocks` what one model finds there and adds."""
