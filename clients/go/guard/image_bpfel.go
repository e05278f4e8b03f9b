// SPDX-License-Identifier: Apache-2.0

//go:build 386 || amd64 || arm || arm64 || loong64 || mips64le || mipsle || ppc64le || riscv64

package guard

import _ "embed"

//go:embed socket_bpfel.image
var socketImage []byte
