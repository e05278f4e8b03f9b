// SPDX-License-Identifier: Apache-2.0

// Package ipfix reads and writes messages of IPFIX (RFC 7011) and NetFlow version 9 (RFC 3954):
// headers, sets, templates and their fields. The caller decodes data records, because it knows
// their template. All numbers are in network byte order.
package ipfix
