"""Before the first step: the split model compared with the whole one."""
