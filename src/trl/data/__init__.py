"""Rows to rows, without a torch model: dataset types, chat templates, tokenisation, packing, mixtures."""
