// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"crypto/tls"
	"fmt"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
)

// TestAgentReadsCertificateAnew checks that an agent shows a replaced certificate to new
// connections.
func TestAgentReadsCertificateAnew(t *testing.T) {
	s := newScene(t)
	a := newAgents(t, s.f, time.Second)
	config := a.ca.TLS("h3").Config().Clone()
	config.ServerName = "lb"
	shown := func() time.Time {
		c, err := tls.Dial("tcp", a.address, config)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		return c.ConnectionState().PeerCertificates[0].NotAfter
	}
	before := shown()
	end := before.Add(time.Hour)
	a.ca.FilesUntil("lb", end)
	nstest.Eventually(t, func() error {
		if !shown().Equal(end) {
			return fmt.Errorf("the agent still shows the certificate until %s", before)
		}
		return nil
	})
}
