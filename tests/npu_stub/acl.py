"""Stands for CANN's acl, which MindSpeed-LLM imports."""
