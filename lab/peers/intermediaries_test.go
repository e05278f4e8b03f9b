// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weir-project/weir/lab"
)

// HAProxy accepts its configuration.
func TestProxyConfiguration(t *testing.T) {
	haproxy, err := lab.Find("haproxy")
	if err != nil {
		t.Skip("need: tool haproxy")
	}
	dir := t.TempDir()
	sources := filepath.Join(dir, "sources.map")
	p := Proxy{Listen: netip.MustParseAddrPort("127.0.0.1:9991"), Backlog: 1024, Header: true,
		Backends: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:9992"), netip.MustParseAddrPort("127.0.0.1:9993")}}
	text := p.configuration(sources)
	if n := strings.Count(text, "send-proxy"); n != 2 {
		t.Errorf("%d backends get a PROXY header:\n%s", n, text)
	}
	config := filepath.Join(dir, "haproxy.cfg")
	for name, b := range map[string]string{sources: "10.99.0.1 collector1\n", config: text} {
		if err := os.WriteFile(name, []byte(b), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	p.Spread = true
	for _, text := range []string{text, p.configuration(sources)} {
		if err := os.WriteFile(config, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.Command(haproxy, "-c", "-f", config).CombinedOutput(); err != nil {
			t.Errorf("haproxy -c: %v\n%s\n%s", err, out, text)
		}
	}
}
