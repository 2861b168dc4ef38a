"""Rollout engines that are SGLang servers, behind its router."""
