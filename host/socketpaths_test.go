// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/weir-project/weir/internal/nstest"
)

// Sockets without a path are a reason of /healthz, and logged.
func TestRemovedSockets(t *testing.T) {
	w := newWorld(t)
	s := w.serve()
	all := []string{s.socket, s.register, s.handoff}
	nstest.Steadily(t, 2*checkEvery, func() error {
		if status, body := s.get("/healthz"); status != http.StatusOK {
			return fmt.Errorf("/healthz: %d %s", status, body)
		}
		return nil
	})
	for i, path := range all {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		if i == 0 { // another file in its place is no socket either
			if err := os.WriteFile(path, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			defer os.Remove(path)
		}
	}
	nstest.Eventually(t, func() error {
		status, body := s.get("/healthz")
		for _, path := range all {
			if status != http.StatusServiceUnavailable || !strings.Contains(body, "socket "+path+" was removed") {
				return fmt.Errorf("%s was removed, and /healthz says %d %s", path, status, body)
			}
			if !s.log.Has("socket was removed", path) {
				return fmt.Errorf("no line in the log about %s", path)
			}
		}
		return nil
	})
}
