// SPDX-License-Identifier: Apache-2.0

package service

import (
	"errors"
	"testing"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/internal/sockdiag"
)

// weir serve checks each missing socket once a second, in hundreds of slots. A check queries the kernel once for the
// sockets of a port, and queries nearly fitting sockets only if the process has any.
func TestLooksAskOnce(t *testing.T) {
	nstest.NeedRoot(t)
	asked := 0
	dumpSockets = func(q sockdiag.Query) ([]sockdiag.Socket, error) { asked++; return sockdiag.Dump(q) }
	t.Cleanup(func() { dumpSockets = sockdiag.Dump })
	look := func(d *daemon) error {
		t.Helper()
		asked = 0
		a, err := Member{PID: d.pid()}.Adopt(t.Context(), here(t), spec(t, []string{"udp :4739", "tcp :1790"}))
		if err == nil {
			a.Close()
		}
		return err
	}
	if err := look(start(t)); !errors.Is(err, ErrNoSocket) || asked != 2 {
		t.Errorf("without a socket: asked %d times, want 2, %v", asked, err)
	}
	// UDP and TCP, for fitting and for nearly fitting sockets.
	if err := look(start(t, "udp4 0.0.0.0:9")); !errors.Is(err, ErrNoSocket) || asked != 4 {
		t.Errorf("with another socket: asked %d times, want 4, %v", asked, err)
	}
}
