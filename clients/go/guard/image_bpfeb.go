// SPDX-License-Identifier: Apache-2.0

//go:build mips || mips64 || ppc64 || s390x

package guard

import _ "embed"

//go:embed socket_bpfeb.image
var socketImage []byte
