#!/usr/bin/env bash
# Debian's Chromium and its driver, which the tests marked `browser` need. Needs root and apt-get.
set -euo pipefail
if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends chromium chromium-driver
