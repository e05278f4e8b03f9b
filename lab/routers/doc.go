// SPDX-License-Identifier: Apache-2.0

// Package routers simulates routers that export telemetry: each has a source address of its own, sends
// IPFIX (RFC 7011) over UDP and holds a BMP session (RFC 7854) over TCP, and knows exactly what it sent.
//
// Every record carries the number of the epoch it was sent in, in a field that collectors print: the
// ingress interface of an IPFIX record, the MED of a route. So what a collector counted can be compared
// with what was sent, for each device, each protocol and each stretch of time.
package routers
