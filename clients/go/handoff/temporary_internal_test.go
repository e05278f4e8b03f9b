// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"net"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// TestTemporary checks that passing errors of accept(2) do not end a listener.
func TestTemporary(t *testing.T) {
	for e, want := range map[unix.Errno]bool{
		unix.EMFILE: true, unix.ENFILE: true, unix.ENOBUFS: true, unix.ENOMEM: true, unix.ECONNABORTED: true, unix.EPROTO: true,
		unix.EPERM: true, unix.ENETDOWN: true, unix.EHOSTUNREACH: true, unix.EOPNOTSUPP: true, unix.EBADF: false, unix.EINVAL: false,
	} {
		if got := temporary(&net.OpError{Op: "accept", Err: os.NewSyscallError("accept4", e)}); got != want {
			t.Errorf("%v: %v", e, got)
		}
	}
}
