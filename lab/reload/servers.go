// SPDX-License-Identifier: Apache-2.0

package reload

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// kind is a server to replace.
type kind struct {
	name   string      // of its service
	listen string      // as in weir.yaml
	stop   unix.Signal // used without weir; weir detects it itself
	// idle and deadline are settings of its generations. DNS clients are never idle. All others end their
	// connections long before the deadline.
	idle, deadline time.Duration
	write          func(dir string) (command []string, err error) // its configuration
	ready          func(h *host) error
}

var kinds = []kind{
	{"nginx", "tcp 0.0.0.0:8080, tcp 0.0.0.0:8443", unix.SIGQUIT, 300 * time.Millisecond, 20 * time.Second, writeNginx, readyTCP("8443")},
	{"knot", "udp 0.0.0.0:53, tcp 0.0.0.0:53", unix.SIGTERM, 200 * time.Millisecond, 300 * time.Millisecond, writeKnot, readyDNS},
	{"caddy", "udp 0.0.0.0:443, tcp 0.0.0.0:443", unix.SIGTERM, 1200 * time.Millisecond, 20 * time.Second, writeCaddy, readyTCP("443")},
	// The clients of the next ones are busy beyond the deadline. Only nginx ends their connections in time.
	{"keep-nginx", "tcp 0.0.0.0:8081", unix.SIGQUIT, 200 * time.Millisecond, 20 * time.Second, writeKeepNginx, readyTCP("8081")},
	{"keep-haproxy", "tcp 0.0.0.0:8082", unix.SIGUSR1, 200 * time.Millisecond, 600 * time.Millisecond, writeKeepHAProxy, readyTCP("8082")},
	{"keep-caddy", "tcp 0.0.0.0:8083", unix.SIGTERM, 200 * time.Millisecond, 600 * time.Millisecond, writeKeepCaddy, readyTCP("8083")},
}

// zone is the zone served by knot.
const zone = "weir.test"

func writeNginx(dir string) ([]string, error) {
	conf := fmt.Sprintf(`daemon off; pid %[1]s/pid; error_log %[1]s/error.log; worker_processes 1;
events { worker_connections 1024; }
http {
	access_log off;
	client_body_temp_path %[1]s/body; proxy_temp_path %[1]s/proxy; fastcgi_temp_path %[1]s/fastcgi;
	uwsgi_temp_path %[1]s/uwsgi; scgi_temp_path %[1]s/scgi;
	keepalive_requests 20;
	ssl_certificate %[2]s/cert.pem; ssl_certificate_key %[2]s/key.pem;
	server { listen 8080; location / { return 200 "weir\n"; } }
	server { listen 8443 ssl http2; location / { return 200 "weir\n"; } }
}
`, dir, filepath.Dir(dir))
	file := dir + "/nginx.conf"
	return []string{"nginx", "-p", dir, "-e", dir + "/error.log", "-c", file}, os.WriteFile(file, []byte(conf), 0o644)
}

// Two knots must not share their databases or their control socket; they may share the zone.
func writeKnot(dir string) ([]string, error) {
	text := fmt.Sprintf("$ORIGIN %s.\n$TTL 60\n@ SOA ns hostmaster 1 3600 600 86400 60\n@ NS ns\nns A 192.0.2.1\nwww A 192.0.2.2\n", zone)
	conf := fmt.Sprintf(`server:
    rundir: %[1]s
    listen: 0.0.0.0@53
    udp-workers: 1
    tcp-workers: 1
    background-workers: 1
database:
    storage: %[1]s
log:
  - target: %[1]s/log
    any: warning
zone:
  - domain: %[2]s
    storage: %[1]s
    file: zone
`, dir, zone)
	file := dir + "/knot.conf"
	if err := os.WriteFile(dir+"/zone", []byte(text), 0o644); err != nil {
		return nil, err
	}
	return []string{"knotd", "-c", file}, os.WriteFile(file, []byte(conf), 0o644)
}

func writeCaddy(dir string) ([]string, error) {
	conf := fmt.Sprintf(`{
	admin off
	auto_https off
	default_sni weir.test
	storage file_system %[1]s
	log {
		output file %[1]s/log
		level WARN
	}
	grace_period 2s
}
https://:443 {
	tls %[2]s/cert.pem %[2]s/key.pem
	respond "weir"
}
`, dir, filepath.Dir(dir))
	file := dir + "/Caddyfile"
	return []string{"env", "HOME=" + dir, "GODEBUG=multipathtcp=0", "GOMAXPROCS=1", "caddy", "run", "--config", file, "--adapter", "caddyfile"}, os.WriteFile(file, []byte(conf), 0o644)
}

// writeCertificate creates the common certificate of all servers.
func writeCertificate(dir string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	t := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "weir.test"}, DNSNames: []string{"weir.test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour)}
	cert, err := x509.CreateCertificate(rand.Reader, t, t, &key.PublicKey, key)
	if err != nil {
		return err
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	for name, b := range map[string]*pem.Block{"cert.pem": {Type: "CERTIFICATE", Bytes: cert}, "key.pem": {Type: "PRIVATE KEY", Bytes: secret}} {
		if err := os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(b), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// clientTLS accepts any certificate, because certificates are not tested here.
func clientTLS(protocols ...string) *tls.Config {
	return &tls.Config{InsecureSkipVerify: true, ServerName: "weir.test", NextProtos: protocols} //nolint:gosec // made a moment ago, by us
}

// readyTCP returns a check for a port accepting connections.
func readyTCP(port string) func(h *host) error {
	return func(h *host) error {
		var c net.Conn
		err := h.client.Do(func() (err error) {
			c, err = net.DialTimeout("tcp", net.JoinHostPort(h.addr, port), time.Second)
			return err
		})
		if err == nil {
			c.Close()
		}
		return err
	}
}

// readyDNS checks for an answer of knot.
func readyDNS(h *host) error {
	var c net.Conn
	err := h.client.Do(func() (err error) { c, err = net.Dial("udp", net.JoinHostPort(h.addr, "53")); return err })
	if err != nil {
		return err
	}
	defer c.Close()
	query := []byte("\x12\x34\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x03www\x04weir\x04test\x00\x00\x01\x00\x01")
	c.SetDeadline(time.Now().Add(200 * time.Millisecond))
	if _, err := c.Write(query); err != nil {
		return err
	}
	answer := make([]byte, 512)
	n, err := c.Read(answer)
	if err == nil && (n < 12 || answer[3]&0xf != 0 || answer[7] == 0) {
		err = fmt.Errorf("answers % x", answer[:n])
	}
	return err
}
