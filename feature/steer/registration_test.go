// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// deadlines is a recorder with deadlines.
type deadlines struct{ *httptest.ResponseRecorder }

func (deadlines) SetReadDeadline(time.Time) error { return nil }

// FuzzRegistration parses arbitrary forms, because every user may register. An accepted form has a service name and a
// timeout within the limits.
func FuzzRegistration(f *testing.F) {
	const form = "application/x-www-form-urlencoded"
	for _, body := range []string{"service=s&slot=1", "service=s&slot=1&timeout_ms=200", "service=s&slot=-1", "service=s&slot=1&timeout_ms=9223372036855",
		"service=s&slot=1&timeout_ms=9223372036854775807", "service=&slot=1", "slot=1", "%", "service=s&slot=1;x", "service=s&service=t&slot=2&slot=3", strings.Repeat("a", 5000)} {
		f.Add(body, form, "service=u&slot=9")
	}
	f.Add("--b\r\nContent-Disposition: form-data; name=service\r\n\r\ns\r\n--b--\r\n", "multipart/form-data; boundary=b", "")
	f.Fuzz(func(t *testing.T, body, kind, query string) {
		r := httptest.NewRequest(http.MethodPost, "/v1/register", strings.NewReader(body))
		r.URL.RawQuery = query
		r.Header.Set("Content-Type", kind)
		q, err := readRegistration(deadlines{httptest.NewRecorder()}, r)
		if err != nil {
			return
		}
		if q.service == "" || q.limit <= 0 || q.limit > registerLongest || len(body) > maxRegistration {
			t.Errorf("%q gives %+v", body, q)
		}
	})
}
