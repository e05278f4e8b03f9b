// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"
	"time"
)

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
