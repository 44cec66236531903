"""The scheduling policies, one file each, and the parts that they share: lines, the bypass bound, request sizes."""
