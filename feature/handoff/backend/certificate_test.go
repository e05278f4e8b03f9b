// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"testing"
	"time"
)

// TestAgentReadsCertificateAnew checks that a running agent reloads its certificate, and still moves sessions.
func TestAgentReadsCertificateAnew(t *testing.T) {
	w := newWorld(t, 2, at4)
	w.connected()
	a := w.servers[0].agent
	end := a.o.TLS.Certificate().NotAfter.Add(time.Hour)
	w.ca.FilesUntil(a.o.Name, end)
	w.eventually("the new certificate is in use", func() bool {
		st, err := a.Status()
		return err == nil && st.Certificate.NotAfter.Equal(end) && st.Certificate.Problem == ""
	})
	w.connected()
}
