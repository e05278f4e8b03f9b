// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// A growing file is read by whole lines, each once, for any buffering of the writer.
func TestTail(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	tl := tail{path: path}
	defer tl.close()
	var got []string
	read := func() {
		t.Helper()
		if err := tl.lines(func(line []byte, at int64) {
			got = append(got, string(line))
			content, err := os.ReadFile(path)
			if err != nil || !strings.HasPrefix(string(content[at:]), string(line)+"\n") {
				t.Errorf("line %q is not at %d: %v", line, at, err)
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	read() // no file exists yet
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	long := strings.Repeat("x", 200<<10)
	for _, s := range []string{"one\ntw", "o\n", "", "\nfour\n" + long, "y\nlast"} {
		if _, err := f.WriteString(s); err != nil {
			t.Fatal(err)
		}
		read()
	}
	if want := []string{"one", "two", "", "four", long + "y"}; !slices.Equal(got, want) {
		t.Errorf("%d lines, want %d: %.60q", len(got), len(want), got)
	}
}

// Lines written by nfacctd 1.7.7.
func TestParse(t *testing.T) {
	a := netip.MustParseAddr
	for _, c := range []struct {
		parse func([]byte) Record
		line  string
		want  Record
	}{
		{parseFlows, `{"event_type": "purge", "peer_ip_src": "10.99.0.58", "iface_in": 2, "packets": 6, "bytes": 6000}`,
			Record{Kind: Flows, Device: a("10.99.0.58"), Epoch: 2, Count: 6}},
		{parseFlows, `{"event_type": "purge", "peer_ip_src": "::ffff:10.99.0.58", "iface_in": 0, "packets": 1, "bytes": 60}`,
			Record{Kind: Flows, Device: a("10.99.0.58"), Count: 1}},
		{parseBMP, `{"seq": 7, "log_type": "update", "is_post": 0, "is_in": 1, "event_type": "log", "afi": 1, "safi": 1, "ip_prefix": "203.0.1.0/24", "med": 6, "bmp_router": "fd00:99::7", "bmp_router_port": 37892, "bmp_msg_type": "route_monitor"}`,
			Record{Kind: Route, Device: a("fd00:99::7"), Epoch: 6, Count: 1}},
		{parseBMP, `{"seq": 3, "event_type": "log", "bmp_router": "10.99.0.75", "local_port": 179, "remote_port": 1025, "bmp_msg_type": "peer_up"}`,
			Record{Kind: PeerUp, Device: a("10.99.0.75"), Count: 1, Port: 1025}},
		{parseBMP, `{"seq": 9, "log_type": "delete", "event_type": "log", "med": 6, "bmp_router": "10.99.0.75", "bmp_msg_type": "internal"}`,
			Record{Kind: Other, Device: a("10.99.0.75"), Count: 1}},
		{parseBMP, `{"seq": 1, "event_type": "log_init", "bmp_router": "10.99.0.75"}`, Record{Kind: Session, Device: a("10.99.0.75"), Count: 1}},
		{parseBMP, `{"seq": 9, "event_type": "log_close", "bmp_router": "10.99.0.75"}`, Record{Kind: Closed, Device: a("10.99.0.75"), Count: 1}},
	} {
		if got := c.parse([]byte(c.line)); got != c.want {
			t.Errorf("%s:\n got %+v\nwant %+v", c.line, got, c.want)
		}
	}
	for _, line := range []string{"", "{", `{"peer_ip_src": "nowhere"}`, "INFO"} {
		if parseFlows([]byte(line)).Kind != Odd || parseBMP([]byte(line)).Kind != Odd {
			t.Errorf("%q is accepted as a record", line)
		}
	}
}

func TestParseLog(t *testing.T) {
	for line, want := range map[string]int{
		"INFO ( default/core/BMP ): [10.99.0.7] BMP peers usage: 7/60":                                             -1,
		"INFO ( p/print ): *** Purging cache - END (PID: 20781, QN: 32/32, ET: 0) ***":                             -1,
		"INFO ( default/core ):  '--build=x86_64-linux-gnu' '--disable-silent-rules' 'CFLAGS=-Werror=format'":      -1,
		"WARN ( default/core/BMP ): [10.99.0.19] Multiple connections from peer and no bgp_agent_map defined.":     -1,
		"INFO ( default/core ): expecting flow '96' but received '104' collector=0.0.0.0:9991 agent=10.100.1.2:7":  int(Gap),
		"INFO ( default/core ): expecting flow '96' but received '104' collector=0.0.0.0:9991 agent=fd00:99::1:32": int(Gap),
		"INFO ( default/core/BMP ): [10.1.1.2] [peer down] packet discarded: missing peer up BMP message":          int(Odd),
		"WARN ( default/core ): missing data detected":                                                             int(Odd),
		"ERROR ( p/print ): We are missing data.":                                                                  int(Odd),
		"Segmentation fault": int(Odd),
	} {
		r, ok := parseLog([]byte(line))
		if ok != (want >= 0) || ok && int(r.Kind) != want {
			t.Errorf("%s: %+v, %v", line, r, ok)
		}
	}
	r, _ := parseLog([]byte("INFO ( default/core ): expecting flow '1' but received '2' collector=0.0.0.0:9991 agent=fd00:99::1:32"))
	if r.Device != netip.MustParseAddr("fd00:99::1") {
		t.Errorf("device %s", r.Device)
	}
}

// Lines written by goflow2 2.2.6 (shortened) and nfdump 1.7.1.
func TestParseOthers(t *testing.T) {
	a := netip.MustParseAddr
	for _, c := range []struct {
		parse func([]byte) Record
		line  string
		want  Record
	}{
		{parseGoFlow2, `{"type":"IPFIX","time_received_ns":1795248990967548701,"sequence_num":0,"sampling_rate":0,"sampler_address":"10.99.0.7","time_flow_start_ns":1795248990738000000,"bytes":1000,"packets":1,"etype":"IPv4","in_if":7,"out_if":2,"as_path":[]}`,
			Record{Kind: Flows, Device: a("10.99.0.7"), Epoch: 7, Count: 1}},
		{parseGoFlow2, `{"type":"NETFLOW_V9","time_received_ns":1795248990968004741,"sampler_address":"fd00:99::7","packets":1,"in_if":7}`, Record{Kind: Flows, Device: a("fd00:99::7"), Epoch: 7, Count: 1}},
		{parseNfdump, "                       ::ffff:10.99.0.7|     7|       1\n", Record{Kind: Flows, Device: a("10.99.0.7"), Epoch: 7, Count: 1}},
		{parseNfdump, "                             fd00:99::7|     7|       1\n", Record{Kind: Flows, Device: a("fd00:99::7"), Epoch: 7, Count: 1}},
	} {
		if got := c.parse([]byte(c.line)); got != c.want {
			t.Errorf("%s:\n got %+v\nwant %+v", c.line, got, c.want)
		}
	}
	for _, line := range []string{"", "{", `{"sampler_address":""}`, "1|2", "nowhere|1|1", "10.0.0.1|x|1"} {
		if parseGoFlow2([]byte(line)).Kind != Odd || parseNfdump([]byte(line)).Kind != Odd {
			t.Errorf("%q is accepted as a record", line)
		}
	}
}
