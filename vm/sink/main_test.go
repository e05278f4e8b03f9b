// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
)

// In the host's namespace another test may use the ports, and the last ones must refuse.
func TestMain(m *testing.M) { nstest.Main(m) }

func TestAskAnswers(t *testing.T) {
	listener, packets, err := open("127.0.0.1:0", false)
	if err != nil {
		t.Fatal(err)
	}
	go answerConnections(listener, "a")
	go answerDatagrams(packets, "b")
	for _, c := range []struct{ network, to, want string }{
		{"tcp", listener.Addr().String(), "a"},
		{"udp", packets.LocalAddr().String(), "b"},
	} {
		got, err := question(c.network, "127.0.0.2", c.to, time.Minute)
		if err != nil || got != c.want {
			t.Errorf("%s: got %q, %v, want %q", c.network, got, err, c.want)
		}
	}
	listener.Close()
	packets.Close()
	for network, to := range map[string]string{"tcp": listener.Addr().String(), "udp": packets.LocalAddr().String()} {
		if got, err := question(network, "", to, time.Minute); err != nil || got != "refused" {
			t.Errorf("%s after close: got %q, %v, want refused", network, got, err)
		}
	}
}

func TestAskEach(t *testing.T) {
	listener, packets, err := open("127.0.0.1:9417", false)
	if err != nil {
		t.Fatal(err)
	}
	go answerConnections(listener, "a")
	go answerDatagrams(packets, "a")
	for _, c := range []struct{ lines, to, want string }{
		{"127.0.1.1 a\n127.0.1.2 a\n", "127.0.0.1:9417", ""},
		{"127.0.1.1 a\n127.0.1.2 b\n", "127.0.0.1:9417", "udp 127.0.0.1:9417 from 127.0.1.2: got a, want b"},
		{"127.0.1.1 refused\n", "127.0.0.1:9418", ""},
		{"127.0.1.1 a\n", "127.0.0.1:9418", "udp 127.0.0.1:9418 from 127.0.1.1: got refused, want a"},
		{"", "127.0.0.1:9417", "no address on standard input"},
	} {
		got := ""
		if err := askEach(strings.NewReader(c.lines), c.to, 20*time.Second); err != nil {
			got = err.Error()
		}
		if got != c.want {
			t.Errorf("%q: %q, want %q", c.lines, got, c.want)
		}
	}
}
