// SPDX-License-Identifier: Apache-2.0

package reload

import "testing"

const wrkText = `Running 1000m test @ http://192.0.2.1:8080/
  1 threads and 12 connections
  9051 requests in 4.51s, 1.39MB read
  Socket errors: connect 1, read 12, write 2002, timeout 3
  Non-2xx or 3xx responses: 5
Requests/sec:   2006.87
`

const dnsText = `Statistics:

  Queries sent:         1000
  Queries completed:    990 (99.00%)
  Queries lost:         4 (0.40%)
  Queries interrupted:  6 (0.60%)

  Response codes:       NOERROR 985 (99.49%), SERVFAIL 5 (0.51%)
`

// Failures of every kind count. A generator without output is an error, not a result without failures.
func TestParse(t *testing.T) {
	f, err := parseWrk(wrkText)
	if want := (finding{9051, 1 + 12 + 2002 + 3 + 5}); err != nil || f != want {
		t.Errorf("wrk: %+v, %v; want %+v", f, err, want)
	}
	if f, err := parseWrk("  10 requests in 4.51s, 1.39MB read\n"); err != nil || f != (finding{10, 0}) {
		t.Errorf("wrk without errors: %+v, %v", f, err)
	}
	f, err = parseDNSPerf(dnsText)
	if want := (finding{1000, 4 + 5}); err != nil || f != want {
		t.Errorf("dnsperf: %+v, %v; want %+v", f, err, want)
	}
	for _, nothing := range []string{"", "unable to connect", "  0 requests in 4.51s", "  Queries sent: 10\n  Queries completed: 0\n  Queries lost: 10\n"} {
		if f, err := parseWrk(nothing); err == nil {
			t.Errorf("wrk said %q, read as %+v", nothing, f)
		}
		if f, err := parseDNSPerf(nothing); err == nil {
			t.Errorf("dnsperf said %q, read as %+v", nothing, f)
		}
	}
}
